"""Mine the tokens that matter: Algorithm 1 of AutoJudge on many problems at once, as a dataset on disk.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039).
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.utils import tqdm
from transformers import GenerationConfig, LogitsProcessorList

from ...artifacts.sampling_settings import decoding_of
from ...models.identity import ModelIdentity, tokenizer_hash, versions, weights_hash
from ...models.inspect import base_of, vocabulary_of
from ...models.rope import ChangingRope
from ...models.trials import why_not_rows
from ...tasks.endpoint import Endpoint
from ...tasks.tasks import AnswerTask, Problem
from ...training.jobs import folders, key_of, prepare
from ...validation import (
    MOST_FACTOR,
    MOST_NEW_TOKENS,
    MOST_ROWS,
    MOST_THREADS,
    check_flag,
    check_int,
    check_number,
    check_positive,
)
from .continuing import Batch, Choice, Continuer, DraftChoices, decoding_processors
from .mined import RECORD, assemble, line_of, read_lines
from .remote import Remote
from .search import Continue, Limits, Mined, Search, Work, search


TAIL = 24  # tokens in which the text that ends a response is looked for


@dataclass(frozen=True)
class MineSettings:
    """What decides every label in the dataset. A resumed run must have the same."""

    max_new_tokens: int = 512  # T_max: of a whole response, whatever is replaced in it
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # of the random state of sampling
    naive: bool = False  # each mismatch of the target's response alone, nothing kept
    max_mismatches: int | None = None  # of a problem; what is cut off is counted
    max_seconds: float | None = None  # of a problem; looked at between two continuations

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1, MOST_NEW_TOKENS)
        check_int("seed", self.seed, 0, 2**63 - 1)
        check_int("top_k", self.top_k, 0)
        check_flag("do_sample", self.do_sample)
        check_flag("naive", self.naive)
        check_positive("top_p", self.top_p, 1.0, hint=": leave --do-sample out for greedy decoding")
        check_positive("temperature", self.temperature, hint=": leave --do-sample out for greedy decoding")
        if self.max_mismatches is not None:
            check_int("max_mismatches", self.max_mismatches, 1)
        if self.max_seconds is not None:
            check_number("max_seconds", self.max_seconds, 0.0, MOST_FACTOR)

    def decoding(self) -> dict[str, Any]:
        """The settings of the models' distributions, as `generate` names them."""
        return decoding_of(asdict(self))


def mine(
    target: Any, draft: Any, tokenizer: Any, task: AnswerTask, problems: Sequence[Problem], out: str | Path,
    settings: MineSettings = MineSettings(), *, batch_size: int = 16, workers: int = 4, resume: bool = False,
    wrap: Callable[[str], str] = str, source: str = "",
) -> Path:  # fmt: skip
    """Mine a dataset into the folder `out`; see `mine_problems` for the search itself.

    Every finished problem is a line on disk at once, so a run that was killed at any moment and resumed gives the same dataset
    as one that was not (but for a time limit, and for near-ties that half precision decides by what shares a batch). Under `accelerate launch` the processes share the problems among them.

    Args:
        target: a loaded model, or an `Endpoint` that serves it.
        problems: what `task` gave, or some of it.
        batch_size: problems in flight; decides the speed alone (in half precision also near-ties).
        workers: threads for requests to servers, and for tasks that run programs.
        wrap: makes the text that a model is given of a problem's prompt, a chat template for example.

    Returns: `out`, a folder that `datasets.load_from_disk` reads, with a data card and mine.json.

    Raises: `ValueError`, one line, for models that cannot be used or settings that differ from those of the unfinished run;
    `OSError` for a server that fails. What was finished before stays, and `resume` goes on from there.
    """
    from accelerate import PartialState

    check_int("batch_size", batch_size, 1, MOST_ROWS)
    check_int("workers", workers, 1, MOST_THREADS)
    if not problems:
        raise ValueError("nothing to mine: there are no problems")
    out, part = folders(out)
    texts = [wrap(p.prompt) for p in problems]
    contents = [[text, p.gold, dict(p.extra)] for text, p in zip(texts, problems, strict=True)]
    _prepared(target, draft, tokenizer, texts, settings)  # before anything is written
    facts = _facts(target, draft, tokenizer, task, contents, settings, source)
    state = PartialState()  # one process, unless `accelerate launch` started several
    if state.is_main_process:
        prepare(out, part, facts, resume, RECORD)
    state.wait_for_everyone()
    if not (part / RECORD).is_file():  # all was there already
        return out

    key = key_of(part / RECORD)
    done = {mined.problem for mined in read_lines(part)}
    state.wait_for_everyone()  # reading takes torn lines away; nobody writes before all have read
    mine_own = [n for n in range(state.process_index, len(problems), state.num_processes) if n not in done]
    found = mine_problems(
        target, draft, tokenizer, task, [problems[n] for n in mine_own], settings,
        batch_size=batch_size, workers=workers, wrap=wrap, numbers=mine_own,
    )  # fmt: skip
    with open(part / f"{state.process_index:05d}.jsonl", "a", encoding="utf-8") as file:
        for mined in tqdm(
            found, desc="mining", unit="problem", total=len(mine_own), disable=not state.is_main_process
        ):
            file.write(line_of(mined, key))
            file.flush()

    state.wait_for_everyone()
    if state.is_main_process:
        assemble(out, part, facts, tokenizer)
    state.wait_for_everyone()
    return out


def mine_problems(
    target: Any, draft: Any, tokenizer: Any, task: AnswerTask, problems: Sequence[Problem],
    settings: MineSettings = MineSettings(), *, batch_size: int = 16, workers: int = 4,
    wrap: Callable[[str], str] = str, numbers: Sequence[int] | None = None,
) -> Iterator[Mined]:  # fmt: skip
    """Run Algorithm 1 on every problem, `batch_size` of them in flight; yields each as it is done (not in their order).

    At each step every problem in flight has one continuation under way, or waits for one answer; a problem that is done makes
    room for the next at once. `numbers`: how the problems are called in what is yielded.
    """
    if not problems:
        return
    texts = [wrap(p.prompt) for p in problems]
    numbers = range(len(problems)) if numbers is None else numbers
    prompts, processors, ends = _prepared(target, draft, tokenizer, texts, settings)
    choice = Choice(processors, settings.seed if settings.do_sample else None)
    vocabulary = vocabulary_of(_local(target, draft))
    limit, over = max(map(len, prompts)) + settings.max_new_tokens, ended(tokenizer, ends, task.ends)
    places = min(batch_size, len(problems))

    pool = ThreadPoolExecutor(workers, "hf-lossy-mine")  # starts no thread before it is given work
    try:
        if isinstance(target, Endpoint):
            continuer: Continuer = Remote(target, tokenizer, sorted(ends), over, pool)
        else:
            continuer = Batch(target, places, limit, choice, over)

        def begin(i: int) -> Search:
            began, seconds = time.monotonic(), settings.max_seconds

            def extract(response: list[int]) -> str | None:
                return task.extract(problems[i], tokenizer.decode(response, skip_special_tokens=True))

            return search(
                Mined(numbers[i], texts[i], prompts[i], [], [], None),
                DraftChoices(draft, prompts[i], limit, vocabulary, choice), over, extract, partial(task.same, problems[i]),
                Limits(settings.max_new_tokens, settings.max_mismatches,
                       lambda: seconds is not None and time.monotonic() - began > seconds),
                against_running=task.against_running, naive=settings.naive,
            )  # fmt: skip

        yield from _drive(_Places(places, continuer, pool if task.slow else None, settings), prompts, begin)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Places:
    """Problems in flight, each in its place; moves a search on when what it asked for is there."""

    def __init__(self, places: int, continuer: Continuer, pool: ThreadPoolExecutor | None, settings: MineSettings):
        self.continuer, self.pool, self.settings = continuer, pool, settings
        self.searches: list[Search | None] = [None] * places
        self.prompts: list[list[int]] = [[] for _ in range(places)]
        self.costs = [[0, 0, 0] for _ in range(places)]  # continuations, tokens, retokenised
        self.pending: dict[Future, Search] = {}

    def begin(self, place: int, found: Search, prompt: list[int]) -> Mined | None:
        self.searches[place], self.prompts[place], self.costs[place] = found, prompt, [0, 0, 0]
        return self.move(place, None)

    def move(self, place: int, value: Any) -> Mined | None:
        """Give a search what it waited for; returns what it found if that was the last."""
        search_here = self.searches[place]
        assert search_here is not None
        try:
            while True:
                asked = search_here.send(value)
                if isinstance(asked, Continue):
                    budget = self.settings.max_new_tokens - len(asked.prefix)
                    self.continuer.start(place, self.prompts[place], asked.prefix, budget)
                    return None
                assert isinstance(asked, Work)
                if self.pool is not None:
                    self.pending[self.pool.submit(asked.run)] = search_here
                    return None
                value = asked.run()
        except StopIteration as stop:
            self.searches[place] = None
            self.continuer.forget(place)
            mined: Mined = stop.value
            mined.continuations, mined.new_tokens, mined.retokenised = self.costs[place]
            return mined

    def step(self) -> Iterator[Mined]:
        """One step of everything that is under way."""
        if self.continuer.busy:
            for place, continuation, respelt in self.continuer.step():
                for i, cost in enumerate((1, len(continuation), int(respelt))):
                    self.costs[place][i] += cost
                if (mined := self.move(place, continuation)) is not None:
                    yield mined
        elif self.pending:
            wait(self.pending, return_when=FIRST_COMPLETED)
        for future in [f for f in self.pending if f.done()]:
            place = self.searches.index(self.pending.pop(future))
            if (mined := self.move(place, future.result())) is not None:
                yield mined

    def narrow(self) -> None:
        """Give up free places once they are half of all: no problem is left for them."""
        used = [place for place, search_here in enumerate(self.searches) if search_here is not None]
        if used and 2 * len(used) <= len(self.searches):
            self.continuer.narrow(used)
            for name in ("searches", "prompts", "costs"):
                setattr(self, name, [getattr(self, name)[place] for place in used])


def _drive(places: _Places, prompts: Sequence[list[int]], begin: Callable[[int], Search]) -> Iterator[Mined]:
    waiting = iter(range(len(prompts)))
    left = len(prompts)
    while left:
        for place, search_here in enumerate(places.searches):
            while search_here is None and (i := next(waiting, None)) is not None:
                mined = places.begin(place, begin(i), prompts[i])
                search_here = places.searches[place]
                if mined is not None:
                    left -= 1
                    yield mined
        for mined in places.step():
            left -= 1
            yield mined
        if left and None in places.searches and left == sum(s is not None for s in places.searches):
            places.narrow()


def ended(tokenizer: Any, ends: set[int], texts: Sequence[str]) -> Callable[[Sequence[int]], bool]:
    """Whether a response is over: its last token is an end token, or one of `texts` stands in its tail."""

    def over(response: Sequence[int]) -> bool:
        if response[-1] in ends:
            return True
        tail = tokenizer.decode(response[-TAIL:]) if texts else ""
        return any(text in tail for text in texts)

    return over


def _local(target: Any, draft: Any) -> Any:
    """The model whose settings and vocabulary count: the target, or where that is behind a server the draft."""
    return draft if isinstance(target, Endpoint) else target


def _prepared(
    target: Any, draft: Any, tokenizer: Any, texts: Sequence[str], settings: MineSettings
) -> tuple[list[list[int]], LogitsProcessorList, set[int]]:
    """The prompts' tokens, and the processors and end tokens that decoding uses; refuses what cannot be mined."""
    if isinstance(target, Endpoint) and settings.do_sample:
        raise ValueError("a target behind a server is mined greedily: its random numbers are its own")
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        if not prompt or not text.strip():
            raise ValueError(f"problem {number} has an empty prompt")
    longest, models = max(map(len, prompts)), [("target", target), ("draft", draft)]
    models = [(name, model) for name, model in models if not isinstance(model, Endpoint)]
    for name, model in models:
        reason = why_not_rows(model)
        if reason is not None:
            raise ValueError(f"mining needs models that run in batches; the {name} does not: {reason}")
    sizes = [vocabulary_of(model) for _, model in models]
    if abs(sizes[0] - sizes[-1]) > 0.02 * max(sizes):  # padding differs by less
        raise ValueError(
            f"the target has {sizes[0]} token ids, the draft {sizes[-1]}: mining needs a draft with the target's tokenizer"
        )
    for name, model in models:
        room = getattr(base_of(model).config.get_text_config(decoder=True), "max_position_embeddings", None)
        if room is not None and longest + settings.max_new_tokens > room:
            raise ValueError(
                f"the longest prompt has {longest} tokens, which with max_new_tokens={settings.max_new_tokens} is more than the "
                f"{room} positions of the {name}: choose fewer new tokens or shorter prompts"
            )
        rope = ChangingRope.of(base_of(model), 1)
        if rope is not None and longest + settings.max_new_tokens > rope.changes_after:
            raise ValueError(
                f"the longest prompt has {longest} tokens, which with max_new_tokens={settings.max_new_tokens} is more than the "
                f"{rope.changes_after} after which the {name}'s RoPE changes: choose fewer new tokens or shorter prompts"
            )
    config = GenerationConfig(max_new_tokens=settings.max_new_tokens, pad_token_id=0, **settings.decoding())
    return prompts, *decoding_processors(_local(target, draft), config)


def _facts(
    target: Any,
    draft: Any,
    tokenizer: Any,
    task: AnswerTask,
    contents: Sequence[list],
    settings: MineSettings,
    source: str,
) -> dict[str, Any]:
    remote = isinstance(target, Endpoint)
    return {
        "settings": asdict(settings),
        "task": task.name,
        "target": None if remote else ModelIdentity.of(target).to_dict(),
        "judge": getattr(getattr(task, "judge", None), "model", None),
        "served": target.model if remote else None,
        "served_at": target.url if remote else None,
        "draft": ModelIdentity.of(draft).to_dict(),
        "target_weights": None if remote else weights_hash(target),
        "draft_weights": weights_hash(draft),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "dtypes": [None if remote else str(target.dtype), str(draft.dtype)],
        "problems": len(contents),
        "problems_sha256": hashlib.sha256(json.dumps(contents, default=str).encode()).hexdigest(),
        "source": source,
        "versions": versions(),
    }
