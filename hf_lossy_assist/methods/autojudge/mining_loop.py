"""Search many problems at once, all sharing one batch of the target or its server. Unsuitable inputs are refused beforehand."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafters.hidden_state import DraftModel, HiddenStateDrafter, refuse_models
from ...models.facts import facts_of
from ...models.introspection import base_of, vocabulary_of
from ...models.probe import why_not_prefixes, why_not_rows
from ...tasks.endpoint import served
from ...tasks.load import AnswerTask, Problem
from ...text.detokenizer import continuation, special_in
from ...training.jobs import SamplingSettings, check_places
from ...validation import LONGEST_DRAFT, MOST_FACTOR, MOST_NEW_TOKENS, check_flag, check_int, check_number
from .draft_predictions import DraftPredictions, Predict, StatesPredictions
from .generation_backend import Decoding, GumbelNoise, LocalBackend, Sampler, ServerBackend, prepare_decoding
from .search import Limits, Mined, Search, Work, search


TAIL = 128  # tokens in which the text that ends a response is searched


@dataclass(frozen=True)
class MineSettings(SamplingSettings):
    """Settings that determine every label in the dataset. A resumed run must have the same."""

    max_new_tokens: int = 512  # T_max: of a whole response, including replacements
    naive: bool = False  # replace each mismatch of the target's response separately
    max_mismatches: int | None = None  # of a problem; problems that are cut are counted
    max_seconds: float | None = None  # of a problem; checked between continuations
    places: int = 1  # tokens that a drafter on the target's states drafts in sequence before it reads new states
    LARGEST_SEED: ClassVar[int] = 2**63 - 1
    GREEDY: ClassVar[str] = "leave --do-sample out"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("max_new_tokens", self.max_new_tokens, 1, MOST_NEW_TOKENS)
        check_int("places", self.places, 1, LONGEST_DRAFT)
        check_flag("naive", self.naive)
        if self.max_mismatches is not None:
            check_int("max_mismatches", self.max_mismatches, 1)
        if self.max_seconds is not None:
            check_number("max_seconds", self.max_seconds, 0.0, MOST_FACTOR)


DEFAULTS = MineSettings()


def prepare_inputs(
    target: PreTrainedModel,
    draft: DraftModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    settings: MineSettings,
) -> tuple[list[list[int]], Decoding]:
    """Return the prompts' tokens and how to decode; refuse inputs that cannot be mined."""
    if served(target) and settings.do_sample:
        raise ValueError("a target behind a server is mined greedily: its random numbers are its own")
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        if not prompt or not text.strip():
            raise ValueError(f"problem {index} has an empty prompt")
    check_places(settings.places, draft)
    models, why_not = {"target": target, "draft": draft}, why_not_rows
    if isinstance(draft, HiddenStateDrafter):
        _refuse_drafter(target, draft)
        del models["draft"]
        why_not = why_not_prefixes
    models = {name: model for name, model in models.items() if not served(model)}
    for name, model in models.items():
        if (reason := why_not(model)) is not None:
            raise ValueError(f"mining needs models that run in batches; the {name} does not: {reason}")
    sizes = [vocabulary_of(model) for model in models.values()]
    if abs(sizes[0] - sizes[-1]) > 0.02 * max(sizes):  # padding differs by less
        raise ValueError(
            f"the target has {sizes[0]} token ids, the draft {sizes[-1]}: mining needs a draft with the target's tokenizer"
        )
    longest = max(map(len, prompts))
    for name, model in models.items():
        room = getattr(base_of(model).config.get_text_config(decoder=True), "max_position_embeddings", None)
        rope = facts_of(model).rope
        for most, what in (
            (room, f"positions of the {name}"),
            (None if rope is None else rope.original, f"after which the {name}'s RoPE changes"),
        ):
            if most is not None and longest + settings.max_new_tokens > most:
                raise ValueError(
                    f"the longest prompt has {longest} tokens, which with max_new_tokens={settings.max_new_tokens} is more than the "
                    f"{most} {what}: choose fewer new tokens or shorter prompts"
                )
    model = draft if served(target) else target
    return prompts, prepare_decoding(model, settings.max_new_tokens, settings.decoding())


def _refuse_drafter(target: PreTrainedModel, draft: HiddenStateDrafter) -> None:
    """Refuse a drafter on the target's states that cannot draft after each token of a response."""
    if served(target):
        raise ValueError(
            f"{draft.kind} reads the target's hidden states, which no server gives: mine with the target here, or with a draft model"
        )
    if not draft.drafts_each_place:
        raise ValueError(f"{draft.kind} fills in a block for each token: mine with an EAGLE drafter or a draft model")
    refuse_models("mining", target, draft)


def mine_problems(
    target: PreTrainedModel, draft: DraftModel, tokenizer: PreTrainedTokenizerBase, task: AnswerTask, problems: Sequence[Problem],
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
    prompts, decoding = prepare_inputs(target, draft, tokenizer, texts, settings)
    noise = GumbelNoise(settings.seed, decoding.warpers) if settings.do_sample else None
    sampler = Sampler(decoding.processors, noise)
    vocabulary = vocabulary_of(draft if served(target) else target)
    limit, over = max(map(len, prompts)) + settings.max_new_tokens, make_end_test(tokenizer, decoding.ends, task)

    def begin(i: int) -> tuple[Mined, Search]:
        predict: Predict
        if isinstance(draft, HiddenStateDrafter):
            predict = StatesPredictions(draft, target, prompts[i], limit, sampler, settings.places)
        else:
            predict = DraftPredictions(draft, prompts[i], limit, vocabulary, sampler)
        began, seconds = time.monotonic(), settings.max_seconds

        def extract(response: list[int]) -> str | None:
            return task.extract(problems[i], continuation(tokenizer, prompts[i], response))

        mined = Mined(indices[i], texts[i], prompts[i], [], [], None)
        return mined, search(
            mined, predict, over, extract, partial(task.same, problems[i]),
            Limits(settings.max_new_tokens, settings.max_mismatches,
                   lambda: seconds is not None and time.monotonic() - began > seconds, partial(tell, indices[i])),
            against_running=task.against_running, naive=settings.naive,
        )  # fmt: skip

    pool = ThreadPoolExecutor(workers, "hf-lossy-mine")  # starts no thread before it has work
    try:
        backend: LocalBackend | ServerBackend
        if served(target):
            backend = ServerBackend(target, tokenizer, sorted(decoding.ends), over, pool)
        else:
            backend = LocalBackend(target, draft, min(batch_size, len(problems)), limit, over, noise)
        loop = _MiningLoop(backend, pool if task.slow else None, settings.max_new_tokens)
        yield from loop.run(map(begin, range(len(problems))), batch_size)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _MiningLoop:
    """Runs several searches at a time; resumes each when the value that it requested is there."""

    def __init__(self, backend: LocalBackend | ServerBackend, pool: ThreadPoolExecutor | None, max_new_tokens: int):
        self.backend, self.pool, self.max_new_tokens = backend, pool, max_new_tokens
        self.running: dict[int, tuple[Mined, Search]] = {}
        self.pending: dict[Future, int] = {}

    def run(self, searches: Iterator[tuple[Mined, Search]], most: int) -> Iterator[Mined]:
        """Run `searches`, up to `most` at a time; yield the result of each when it ends."""
        while True:
            for mined, steps in islice(searches, most - len(self.running)):
                self.running[mined.problem] = mined, steps
                yield from self._advance(mined.problem, None)
            if not self.running:
                return
            if self.backend.busy:
                for index, tokens, retokenised in self.backend.step():
                    mined, _ = self.running[index]
                    mined.continuations += 1
                    mined.new_tokens += len(tokens)
                    mined.retokenised += retokenised
                    yield from self._advance(index, tokens)
            elif self.pending:
                wait(self.pending, return_when=FIRST_COMPLETED)
            for future in [future for future in self.pending if future.done()]:
                yield from self._advance(self.pending.pop(future), future.result())

    def _advance(self, index: int, value: object) -> Iterator[Mined]:
        """Send a search the value that it requested; yield its result if it ends."""
        mined, steps = self.running[index]
        try:
            while isinstance(request := steps.send(value), Work):
                if self.pool is not None:
                    self.pending[self.pool.submit(request.run)] = index
                    return
                value = request.run()
            budget = self.max_new_tokens - len(request.prefix)
            self.backend.start(index, mined.prompt_ids, request.prefix, budget)
        except StopIteration:
            del self.running[index]
            yield mined


def make_end_test(
    tokenizer: PreTrainedTokenizerBase, ends: set[int], task: AnswerTask | None = None
) -> Callable[[Sequence[int]], bool]:
    """Return a test of whether a response has ended: by an end token, or because the task recognises its tail as an end."""
    if task is None or not task.ends_early:
        return lambda response: response[-1] in ends
    visible = special_in(tokenizer, task.ends)
    return lambda response: (
        response[-1] in ends or task.over(continuation(tokenizer, response[:-TAIL], response[-TAIL:], visible))
    )
