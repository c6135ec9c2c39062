"""Mine important tokens: Algorithm 1 of AutoJudge on many problems at once, as a dataset on disk.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039). All problems share one batch of the target.
"""

import json
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from ...artifacts.files import write_text
from ...drafters.hidden_state import refuse_models
from ...generation.preparation import Preparation, TextRequest
from ...generation.scheduler import Scheduler
from ...models.facts import facts_of
from ...models.introspection import base_of, vocabulary_of
from ...models.prefix_cache import PrefixCache
from ...policy.parse import as_policy
from ...setting_fields import check_bounds
from ...tasks.load import AnswerTask, Problem
from ...text.detokenizer import continuation, special_in
from ...training.jobs import describe_run, refuse_drafter
from ...training.processes import Models, Processes, TellUnit
from ...training.run_folder import RunFolder, name_units
from ...validation import MOST, MOST_FACTOR, MOST_NEW_TOKENS, MOST_ROWS, MOST_THREADS, check_int
from .dataset import RECORD, assemble, explain_nothing, summarise
from .draft_predictions import DraftPredictions, Sampler, prepare_decoding
from .search import Limits, Mined, Search, Work, search


FIRST = 8  # problems after which a run without any finding warns, so that long runs do not end without one
TAIL = 128  # tokens in which the text that ends a response is searched
EndTest: TypeAlias = Callable[[Sequence[int]], bool]  # whether a response has ended with its last token


@dataclass(frozen=True)
class MineSettings:
    """Settings that determine every label in the dataset, of greedy decoding. A resumed run must have the same."""

    max_new_tokens: Annotated[int, (1, MOST_NEW_TOKENS), "most tokens of a whole response"] = 512  # T_max
    max_mismatches: Annotated[int | None, (1, MOST), "most mismatches of a problem; further ones are counted"] = None
    max_seconds: Annotated[float | None, (0.0, MOST_FACTOR), "most seconds for a problem; then it is cut short"] = None

    def __post_init__(self) -> None:
        check_bounds(self)


DEFAULTS = MineSettings()


def mine(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: AnswerTask, problems: Sequence[Problem], out: str | Path,
    settings: MineSettings = DEFAULTS, *, batch_size: int = 16, workers: int = 4, resume: bool = False,
    wrap: Callable[[str], str] = str, source: str = "", processes: Processes | None = None,
) -> Path:  # fmt: skip
    """Mine a dataset into the folder `out`; for the search see `mine_problems`.

    Every finished problem is written to disk at once, so a run that was killed at any moment and resumed gives the same dataset as an uninterrupted
    one (except for a time limit, and for near-ties in half precision, which depend on the batch). Processes started by
    `accelerate launch` share the problems.

    Args:
        problems: all or some of the problems of `task`.
        batch_size: problems in flight; affects only the speed (in half precision also near-ties).
        workers: threads for tasks that run programs.
        wrap: turns a problem's prompt into the text given to the model, for example with a chat template.
        processes: what shares the problems; None: the processes that `accelerate launch` started.

    Returns: `out`, a folder for `datasets.load_from_disk`, with a data card and mine.json.

    Raises: `ValueError`, one line, for models that cannot be used or settings that differ from those of the unfinished run.
    Finished problems are kept, and `resume` continues from there.
    """
    check_int("batch_size", batch_size, 1, MOST_ROWS)
    check_int("workers", workers, 1, MOST_THREADS)
    if not problems:
        raise ValueError("nothing to mine: there are no problems")
    texts = [wrap(p.prompt) for p in problems]
    prepare_inputs(target, draft, tokenizer, texts, settings)  # before anything is written
    contents = [[text, p.gold, dict(p.extra)] for text, p in zip(texts, problems, strict=True)]
    models = {"target": target, "draft": draft}
    decided = asdict(settings) | {"do_sample": False}
    facts = describe_run(decided, models, tokenizer, contents, source, "problems") | {
        "task": task.name,
        "ends": [*task.ends, *([] if task.closing is None else [task.closing.pattern])],
        "judge": getattr(getattr(task, "judge", None), "model", None),
    }
    processes = Processes.started() if processes is None else processes

    def work(models: Models, indices: Sequence[int], tell: TellUnit) -> Iterator[tuple[int, Mined]]:
        mined_problems = mine_problems(
            *models, task, [problems[n] for n in indices], settings,
            batch_size=batch_size, workers=workers, wrap=wrap, indices=indices, tell=tell,
        )  # fmt: skip
        for mined in mined_problems:
            yield mined.problem, mined

    names = name_units(len(problems), "json")
    with RunFolder.opened(out, RECORD, facts, resume=resume, processes=processes) as run:
        todo = run.list_missing(names)
        count, first = len(processes.share(todo)), list[Mined]()

        def write(index: int, mined: Mined) -> None:
            write_text(run.part / names[index], json.dumps(asdict(mined)))
            first.append(mined)
            if len(first) == FIRST < count and not any(one.mismatches for one in first):
                why = explain_nothing({"problems": FIRST, "found": summarise(first, settings.max_new_tokens)})
                warnings.warn(f"the first {FIRST} problems gave no mismatch: {why}", stacklevel=4)

        processes.run(work, (target, draft, tokenizer), todo, write, ("mining", "problems"), batch_size)
        processes.on_first(lambda: assemble(run, tokenizer))
    return run.out


def prepare_inputs(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    settings: MineSettings,
) -> tuple[list[list[int]], LogitsProcessorList, set[int]]:
    """Return the prompts' tokens, processors and end tokens; refuse inputs that cannot be mined."""
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        if not prompt or not text.strip():
            raise ValueError(f"problem {index} has an empty prompt")
    refuse_drafter("mining", draft)
    refuse_models("mining", target, draft)
    sizes = vocabulary_of(target), vocabulary_of(draft)
    if abs(sizes[0] - sizes[1]) > 0.02 * max(sizes):  # padding differs by less
        raise ValueError(
            f"the target has {sizes[0]} token ids, the draft {sizes[1]}: mining needs a draft with the target's tokenizer"
        )
    longest = max(map(len, prompts)) + settings.max_new_tokens
    for name, model in {"target": target, "draft": draft}.items():
        rope, config = facts_of(model).rope, base_of(model).config.get_text_config(decoder=True)
        most = getattr(config, "max_position_embeddings", longest) if rope is None else rope.original
        if longest > most:
            what = f"{most} positions" if rope is None else f"another RoPE after {most} tokens"
            raise ValueError(
                f"the longest prompt and max_new_tokens are {longest} tokens, and the {name} has {what}: choose fewer new tokens or "
                "shorter prompts"
            )
    return prompts, *prepare_decoding(target, settings.max_new_tokens)


def mine_problems(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: AnswerTask, problems: Sequence[Problem],
    settings: MineSettings = DEFAULTS, *, batch_size: int = 16, workers: int = 4,
    wrap: Callable[[str], str] = str, indices: Sequence[int] | None = None,
    tell: Callable[[int, float], None] = lambda index, share: None,
) -> Iterator[Mined]:  # fmt: skip
    """Run Algorithm 1 on every problem, `batch_size` of them in flight; yield each when it is finished, in any order.

    At each step every problem in flight has one continuation running, or waits for one answer; a finished problem makes
    room for the next at once.

    Args:
        indices: the problems' numbers in the results. tell: called with a problem's number and the share of it that is done.
    """
    if not problems:
        return
    texts = [wrap(p.prompt) for p in problems]
    indices = range(len(problems)) if indices is None else indices
    prompts, processors, ends = prepare_inputs(target, draft, tokenizer, texts, settings)
    sampler, vocabulary = Sampler(processors), vocabulary_of(target)
    limit, over = max(map(len, prompts)) + settings.max_new_tokens, make_end_test(tokenizer, ends, task)

    def begin(i: int) -> tuple[Mined, Search]:
        began, seconds = time.monotonic(), settings.max_seconds

        def extract(response: list[int]) -> str | None:
            return task.extract(problems[i], continuation(tokenizer, prompts[i], response))

        mined = Mined(indices[i], texts[i], prompts[i], [], [], None)
        return mined, search(
            mined, DraftPredictions(draft, prompts[i], limit, vocabulary, sampler), over, extract, partial(task.same, problems[i]),
            Limits(settings.max_new_tokens, settings.max_mismatches,
                   lambda: seconds is not None and time.monotonic() - began > seconds, partial(tell, indices[i])),
        )  # fmt: skip

    pool = ThreadPoolExecutor(workers, "hf-lossy-mine")  # starts no thread before it has work
    try:
        loop = MiningLoop(target, draft, min(batch_size, len(problems)), limit, over, pool if task.slow else None)
        yield from loop.run(map(begin, range(len(problems))))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class ResponseEnds(StoppingCriteria):
    """The end of the response that begins after `start` tokens."""

    judges_rows_alone = True  # it keeps nothing

    def __init__(self, over: EndTest, start: int):
        self.over, self.begin = over, start

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.tensor([self.over(text[self.begin :]) for text in input_ids.tolist()], device=input_ids.device)


class MiningLoop:
    """Runs several searches at a time, and resumes each when the value that it requested is there.

    The target continues texts by the scheduler of `generate_many`, whose prefix cache has what they have in common. The draft drafts under strict
    acceptance, which changes no token of greedy decoding.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        rows: int,
        limit: int,
        over: EndTest,
        pool: ThreadPoolExecutor | None = None,
    ):
        """`rows`: searches at a time. `limit`: most tokens of a prompt and its response. `pool`: does work that may be slow."""
        settings = {"assistant_model": draft, "do_sample": False, "pad_token_id": 0}
        self.preparation = Preparation(target, as_policy("strict"), None, 0, settings)
        self.scheduler = Scheduler(self.preparation, rows, prefixes=PrefixCache(rows * limit))
        self.rows, self.over, self.pool = rows, over, pool
        self.searches: dict[int, tuple[Mined, Search]] = {}
        self.waiting, self.pending = deque[TextRequest](), dict[Future, int]()

    def run(self, searches: Iterator[tuple[Mined, Search]]) -> Iterator[Mined]:
        """Run `searches`; yield the result of each when it ends."""
        while True:
            for mined, steps in islice(searches, self.rows - len(self.searches)):
                self.searches[mined.problem] = mined, steps
                yield from self._advance(mined.problem, None)
            if not self.searches:
                return
            while self.waiting and self.scheduler.admit(self.waiting[0]):
                self.waiting.popleft()
            if self.scheduler.going:
                for result in self.scheduler.step():
                    mined, _ = self.searches[result.index]
                    mined.continuations += 1
                    mined.new_tokens += len(result.token_ids)
                    yield from self._advance(result.index, result.token_ids)
            elif self.pending:
                wait(self.pending, return_when=FIRST_COMPLETED)
            for future in [future for future in self.pending if future.done()]:
                yield from self._advance(self.pending.pop(future), future.result())

    def _advance(self, index: int, value: object) -> Iterator[Mined]:
        """Send a search the value that it requested; yield its result if it ends."""
        mined, steps = self.searches[index]
        try:
            while isinstance(request := steps.send(value), Work):
                if self.pool is not None:
                    self.pending[self.pool.submit(request.run)] = index
                    return
                value = request.run()
            text, ends = mined.prompt_ids + request.prefix, ResponseEnds(self.over, len(mined.prompt_ids))
            self.waiting.append(
                self.preparation.request(index, text, max_new_tokens=request.budget, stopping_criteria=[ends])
            )
        except StopIteration:
            del self.searches[index]
            yield mined


def make_end_test(tokenizer: PreTrainedTokenizerBase, ends: set[int], task: AnswerTask | None = None) -> EndTest:
    """Return a test of whether a response has ended: by an end token, or because the task recognises its tail as an end."""
    if task is None or not task.ends_early:
        return lambda response: response[-1] in ends
    visible = special_in(tokenizer, task.ends)
    return lambda response: (
        response[-1] in ends or task.over(continuation(tokenizer, response[:-TAIL], response[-TAIL:], visible))
    )
