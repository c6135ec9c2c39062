"""Run a policy in Transformers' assisted generation inside a context, and collect statistics."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import finalize

import torch
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from ..artifacts.features import FeatureTap
from ..batch.callers_code import check_grammars
from ..engine.call import PositionLimits
from ..generation.arguments import Settings
from ..generation.draft_settings import DRAFT_SETTINGS, make_cost_key
from ..generation.model_checks import announce
from ..generation.runner import Runner
from ..models.facts import CACHE
from ..models.introspection import base_of, device_of, dtype_of, vocabulary_of
from ..models.row_model import RowModel
from ..policy.parse import as_policy
from ..policy.policy import LossyPolicy
from ..stats.clock import Clock
from ..stats.speculation import RowStats, SpeculationStats
from .rounds import AcceptanceProcessor, PolicyCandidateGenerator


WAY_OUT = "call hla.enable(target) and pass lossy_policy=…"
NAME = "_get_candidate_generator"  # the method by which `generate` gets the candidate generator of a call
_lock = threading.Lock()
_open: Counter[PreTrainedModel] = Counter()  # open contexts of each target, of all threads


class TransformersLoop:
    """The policy and statistics of an `in_transformers_loop` context."""

    def __init__(self, policy: LossyPolicy, settings: Mapping[str, object] | None = None, way_out: str = WAY_OUT):
        """Take the call's draft `settings`, and what a user does about a refused call."""
        if policy.stop is not None and policy.stop.joint:
            raise ValueError(
                f"{type(policy.stop).__name__} weighs the rows of a batch against each other, and Transformers' own loop has one row: {way_out}"
            )
        self.policy, self.settings, self.way_out, self.open = policy, dict(settings or {}), way_out, True
        self._calls: list[tuple[SpeculationStats, Clock]] = []

    @property
    def drafts(self) -> bool:
        """Return whether an assisted call has begun."""
        return bool(self._calls)

    @property
    def speculation(self) -> SpeculationStats:
        """The statistics of the context's assisted calls, one row each. Raises: `ValueError` before the first call."""
        if not self._calls:
            raise ValueError(
                "in_transformers_loop: no assisted call has run yet: pass assistant_model=… to generate, inside the context and in its thread"
            )
        for stats, clock in self._calls:
            stats.close(clock)
        return SpeculationStats.merge([stats for stats, _ in self._calls])


# Targets and contexts that this thread or asyncio task has entered.
LOOPS: ContextVar[tuple[tuple[PreTrainedModel, TransformersLoop], ...]] = ContextVar("LOOPS", default=())


def find_loop(target: PreTrainedModel) -> TransformersLoop | None:
    """Return the latest open context of this thread on `target`, or None."""
    return next((loop for model, loop in reversed(LOOPS.get()) if model is target and loop.open), None)


@contextmanager
def in_transformers_loop(target: PreTrainedModel, policy: object) -> Iterator[TransformersLoop]:
    """Make `target.generate(**inputs, assistant_model=draft)` run a policy in Transformers' assisted generation, one row a call.

    Decisions use the same code as `lossy_policy=`; caches, stopping criteria and the limit of one row remain Transformers'. A standing policy does
    not act on such calls. A context belongs to the thread or asyncio task that enters it; calls of other threads are plain.

    Args:
        target: a Transformers model with `generate`.
        policy: any value of `lossy_policy=`.

    Yields: a `TransformersLoop`; its `speculation` holds the statistics of the calls.
    """
    base = base_of(target)
    if not isinstance(base, GenerationMixin):
        raise TypeError(
            f"in_transformers_loop: expected a Transformers model with generate(), got {type(target).__name__}"
        )
    with entered(base, TransformersLoop(as_policy(policy))) as loop:
        yield loop


@contextmanager
def entered(base: PreTrainedModel, loop: TransformersLoop) -> Iterator[TransformersLoop]:
    """Run a loop's policy in the assisted calls of this thread on a Transformers model."""
    with _lock:
        _open[base] += 1
        setattr(base, NAME, partial(_get_generator, base))
    LOOPS.set((*LOOPS.get(), (base, loop)))
    try:
        yield loop
    finally:
        loop.open = False  # also where another thread ends the context
        LOOPS.set(tuple(pair for pair in LOOPS.get() if pair[1].open))
        with _lock:
            _open[base] -= 1
            if not _open[base]:
                del _open[base]
                delattr(base, NAME)


def _get_generator(target: PreTrainedModel, **arguments: Any) -> object:
    """Make the candidate generator of a call: in a context of this thread the policy's, else Transformers'."""
    loop = find_loop(target)
    if loop is None:
        return type(target)._get_candidate_generator(target, **arguments)
    return _make_generator(loop, target, arguments)


def _make_generator(
    loop: TransformersLoop, target: PreTrainedModel, arguments: dict[str, Any]
) -> PolicyCandidateGenerator:
    """Make a call's generator and replace the call's processors. `arguments`: the arguments of Transformers' `_get_candidate_generator`."""
    policy, ids, config = loop.policy, arguments["input_ids"], arguments["generation_config"]
    drafting = _transformers_generator(loop, target, arguments)
    draft = drafting.assistant_model
    settings = Settings(loop.settings, config, target.generation_config)
    runner = Runner(policy, draft, settings={name: settings.resolve(name) for name in DRAFT_SETTINGS})
    checked = runner.validate(target)
    runner.check_decoding(checked.draft, target, config, config.max_length - ids.shape[1])
    announce(policy)
    companion = policy.filter.companion_for(target)
    mask = arguments["model_kwargs"].get("attention_mask")
    shown = ids[0] if mask is None or mask.shape != ids.shape else ids[0][mask[0].ne(0).to(ids.device)]
    if companion is not None and len(shown) < ids.shape[1]:
        raise ValueError(
            f"the companion reads whole texts here, and this prompt has hidden tokens: leave them out, or {loop.way_out}"
        )
    for name, head in policy.heads().items():
        head.to(device_of(draft) if name.startswith("stop") else ids.device)
    clock, row = Clock(ids.device), RowStats()
    stop = checked.stop.start(1)
    cost_key = make_cost_key(policy, None, config, ids.device, target.dtype, "Transformers' loop")
    stop.pair(target, draft, cost_key)
    listed: LogitsProcessorList = arguments["logits_processor"]
    check_grammars(listed, target, None)
    processors = LogitsProcessorList(listed)
    spec = policy.rule.features
    tap = None if spec is None or not spec.reads("target") else FeatureTap(target, spec)
    acceptance = AcceptanceProcessor(policy.rule.start([shown]), processors, target, tap, clock, row)
    listed[:] = [acceptance]  # the list that the loop uses; the draft has a copy
    stats = SpeculationStats([row], stop.settings.longest, policy.lossless, dtype=dtype_of(target))
    loop._calls.append((stats, clock))
    reader = None if companion is None else RowModel(companion, 1, config.max_length, vocabulary_of(target))
    positions = PositionLimits(target, base_of(draft), companion, shortest=shown.shape[-1])
    generator = PolicyCandidateGenerator(
        drafting, policy, stop, acceptance, processors, reader, bool(config.do_sample), clock, positions
    )
    finalize(generator, acceptance.reading.close)  # a call that fails while the target reads ends without a word to us
    return generator


def _transformers_generator(
    loop: TransformersLoop, target: PreTrainedModel, arguments: dict[str, Any]
) -> AssistedCandidateGenerator:
    """Return Transformers' generator for a call. Raises: `ValueError` for one that does not support policies."""
    if (rows := len(arguments["input_ids"])) > 1:
        raise ValueError(f"Transformers' own assisted loop has one row, this call has {rows}: {loop.way_out}")
    if getattr(arguments["generation_config"], "assistant_ensemble_weight", None) is not None:
        raise ValueError(
            "assistant_ensemble_weight is a rule of its own beside the policy's: leave it out, or take the policy Ensemble(w)"
        )
    cache = arguments["model_kwargs"].get(CACHE)
    if cache is not None and cache.get_seq_length() > 0:  # the loop would append the cached text again
        raise ValueError(
            f"Transformers' own assisted loop cannot go on from a filled cache: leave {CACHE} out, or {loop.way_out}"
        )
    generator = type(target)._get_candidate_generator(target, **arguments)
    if type(generator) is not AssistedCandidateGenerator:
        raise ValueError(
            f"a policy in Transformers' own loop cannot draft by {type(generator).__name__}: {loop.way_out}"
        )
    if generator.logits_processor is arguments["logits_processor"]:
        generator.logits_processor = LogitsProcessorList(generator.logits_processor)
    if generator.input_ids_key == "input_ids" and generator.assistant_kwargs.get("attention_mask") is None:
        # Transformers omits a mask without zeros; the draft would then mask tokens with the padding id.
        ones = torch.ones_like(arguments["input_ids"], device=generator.assistant_model.device)
        generator.assistant_kwargs["attention_mask"] = ones
    if generator.generation_config.eos_token_id is None:  # the draft's `generate` would use the draft's end tokens
        generator.generation_config.eos_token_id = vocabulary_of(target)
    return generator
