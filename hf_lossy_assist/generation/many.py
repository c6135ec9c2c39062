"""Continuous batching over many prompts: a finished text is replaced by the next prompt."""

import inspect
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..batch.suffix_memory import POOL_TOKENS, SuffixMemory
from ..drafters.base import split_assistant_and_drafter
from ..models.distributed import refuse_spread
from ..models.introspection import base_of, dtype_of
from ..policy.parse import as_policy
from ..stats.speculation import RowStats, SpeculationStats
from ..tasks.prompts import LIMITS
from ..validation import MOST, MOST_ROWS, check_int, shown
from .arguments import Settings, complete_config, find_other_inputs, refuse_per_call
from .model_checks import refuse_models
from .output import Result
from .preparation import Preparation, TextRequest
from .scheduler import Scheduler


Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


class Texts(Iterator[Result]):
    """The iterator that `generate_many` returns, over results in order of completion.

    `close()` ends it early, as does leaving a loop over it.
    """

    def __init__(self, scheduler: Scheduler, requests: Iterator[TextRequest]):
        self._scheduler = scheduler
        self._results = self._written(requests)
        self._short: dict[int, TextRequest] = {}  # texts that may end at the target's last position

    def __next__(self) -> Result:
        return next(self._results)

    def close(self) -> None:
        """Stop decoding."""
        self._results.close()

    @property
    def speculation(self) -> SpeculationStats | None:
        """Statistics of all texts so far as one row, with the seconds of all forwards;
        None before the first text has finished."""
        return self._scheduler.finished.stats()

    def _written(self, requests: Iterator[TextRequest]) -> Generator[Result, None, None]:
        scheduler = self._scheduler
        try:
            request = next(requests, None)
            while request is not None or scheduler.going:
                while request is not None and (_has_no_room(request) or scheduler.admit(request)):
                    if _has_no_room(request):
                        yield self._empty(request)
                    elif request.room is not None:
                        self._short[request.index] = request
                    request = next(requests, None)
                for result in scheduler.step():
                    self._warn_of_end(result)
                    yield result
        finally:
            scheduler.close()

    def _empty(self, request: TextRequest) -> Result:
        preparation, tokens, policy = self._scheduler.preparation, len(request.prompt), self._scheduler.policy
        positions = tokens + (request.room or 0) - 1
        warnings.warn(
            f"prompt {request.index} has {tokens} tokens, and the target {positions} positions: its text is empty",
            stacklevel=4,
        )
        stats = SpeculationStats([RowStats()], 0, policy.lossless, dtype=dtype_of(preparation.target))
        return Result(request.index, [], preparation.text(request.prompt, []), stats, 0.0)

    def _warn_of_end(self, result: Result) -> None:
        request, new = self._short.pop(result.index, None), result.token_ids
        if request is None or len(new) != request.room or new[-1] in request.template.call.rows.eos:
            return
        if new and len(new) != request.settings.get("max_new_tokens", self._scheduler.preparation.new_tokens):
            warnings.warn(
                f"the text of prompt {result.index} ends after {len(new)} new tokens: the target has no more positions",
                stacklevel=4,
            )


def _has_no_room(request: TextRequest) -> bool:
    return request.room is not None and request.room <= 0


def generate_many(
    target: Any, prompts: Iterable[Prompt], *, assistant_model: object = None, lossy_policy: object = ...,
    max_rows: int = 16, max_tokens: int | None = None, tokenizer: Any = None, seed: int | None = None,
    numbers: Iterable[int] | None = None, **settings: object,
) -> Texts:  # fmt: skip
    """Generate continuations of many prompts, `max_rows` at a time; return an iterator over results in order of
    completion.

    With a lossless policy and greedy decoding, each text equals the output of `target.generate` for its prompt alone.
    In sampling, each prompt has separate random numbers, so that its text does not depend on the other prompts. A
    prefix that a recent prompt shares is read once.

    Args:
        target: the model.
        prompts: texts, which need `tokenizer`, or lists of token ids; any iterable, read as rows become free. A prompt
            may be a mapping with limits: `{"prompt": …, "max_new_tokens": …, "min_new_tokens": …, "stop_strings": …,
            "seed": …, "logits_processor": […], "hints": […]}`; all but the first are optional.
        assistant_model, lossy_policy, settings: as in `generate` of an enabled model; default policy, and None: strict;
            lengths by `max_new_tokens=`. A drafter that searches texts also searches the finished ones, up to 32 768
            tokens, in greedy decoding with a lossless policy; `hints` are documents that texts will copy. Stateful
            `stopping_criteria` and `logits_processor` are passed as a function that returns a list, given a prompt's
            token ids.
        max_rows: maximum number of texts in the batch; halved, with a warning, if memory runs out. Up to 1024 tokens of
            at most `max_rows` further prompts are prefilled before a row is free; one more is read from `prompts`.
        max_tokens: maximum number of tokens in flight, of prompts and texts, as room for keys and values, including
            prefilled prompts; a prompt that needs more is decoded alone.
        seed: of all random numbers; None: drawn from torch's global generator, once, unless nothing is random, as in
            greedy decoding.
        numbers: of the prompts, one each, which identify results and random numbers; None: 0, 1, …. Processes that
            share the prompts produce the output of a single process if each passes the numbers of its prompts.
        refused (among the settings): a function, called with the number of an invalid prompt and the error, which is
            raised without one.

    Returns: an iterator over `Result`s; its `speculation` has the statistics of all of them.

    Raises: `ValueError` or `TypeError`, one line, for arguments of a single call, before anything is decoded; errors of
    `generate` are raised at the prompt in question.
    """
    refused: Any = settings.pop("refused", None)
    assistant_model, drafter = split_assistant_and_drafter(assistant_model, settings.pop("drafter", None))
    refuse_models(target, assistant_model)
    refuse_spread("target of generate_many", target)
    check_int("max_rows", max_rows, 1, MOST_ROWS)
    for name, value, bounds in (("seed", seed, LIMITS["seed"]), ("max_tokens", max_tokens, (1, MOST))):
        if value is not None:
            check_int(name, value, *bounds)
    config = settings.get("generation_config")
    complete = complete_config(config, target.generation_config)
    refuse_per_call(Settings(settings, complete, target.generation_config))
    inputs = find_other_inputs(settings, complete).keys() & inspect.signature(base_of(target).forward).parameters
    if inputs:
        names = ", ".join(sorted(inputs))
        raise ValueError(
            f"generate_many takes text prompts only, got {names}: call generate for each of these prompts"
        )
    if isinstance(prompts, Mapping):  # a tokenizer's output, whose keys would be read as texts
        raise TypeError('prompts: expected texts or token ids, got a mapping: pass its ["input_ids"], without padding')
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: expected texts or lists of token ids, got {shown(prompts)}")
    numbered = enumerate(prompts) if numbers is None else _numbered(numbers, prompts)
    settings |= {"assistant_model": assistant_model, "drafter": drafter}
    policy = as_policy("strict" if lossy_policy is ... or lossy_policy is None else lossy_policy)
    preparation = Preparation(target, policy, tokenizer, seed, settings)
    preparation.pool = SuffixMemory(POOL_TOKENS)
    return Texts(Scheduler(preparation, max_rows, max_tokens), _requests(preparation, numbered, refused))


def _requests(
    preparation: Preparation, numbered: Iterable[tuple[int, Any]], refused: Callable[[int, Exception], object] | None
) -> Iterator[TextRequest]:
    for index, prompt in numbered:
        try:
            request = preparation.request(index, prompt)
        except (ValueError, TypeError) as error:
            if refused is None:
                raise
            refused(index, error)
        else:
            yield request


def _numbered(numbers: Iterable[int], prompts: Iterable[object]) -> Iterator[tuple[int, Any]]:
    rest, seen = iter(numbers), set[int]()
    for prompt in prompts:
        index = next(rest, None)
        if index is None:
            raise ValueError("numbers: there are fewer than prompts: pass one for each")
        check_int("numbers", index, 0)
        if index in seen:  # its random numbers would be used twice
            raise ValueError(f"numbers: {index} is there twice, and results go by it: give each prompt its own")
        seen.add(index)
        yield index, prompt
