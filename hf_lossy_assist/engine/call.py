"""The state of one generate call, and rows that join it: their prompts are prefilled in a separate call."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..artifacts.features import FeatureTap
from ..batch.criteria import RowEnds
from ..batch.logits_processing import Processing, RowProcessing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..batch.suffix_memory import SuffixMemory
from ..drafters.base import DrafterRun
from ..models.cached_model import NotJoined, TargetModel
from ..models.compiled.static_model import StaticRowModel
from ..models.facts import facts_of
from ..models.introspection import dtype_of
from ..models.row_model import RowModel
from ..policy.policy import LossyPolicy
from ..round import Verdict, Verified
from ..rules import RuleRun
from ..stats.clock import Clock
from ..stats.speculation import RowStats, SpeculationStats
from ..stops import StopRun
from ..stops.fallback import Fallback
from ..tensors import upload


PACKAGE = __name__.partition(".")[0]


class PositionLimits:
    """Limits from learned position tables, such as GPT-2's, and from RoPE that changes with the length of the text.

    Texts stay within the target's, drafts within every model's.
    """

    def __init__(self, target: PreTrainedModel, *others: PreTrainedModel | None, shortest: int):
        """`target` and `others` are Transformers models; `others` may contain None.
        `shortest`: tokens of the shortest prompt."""
        facts = [facts_of(model) for model in (target, *others) if model is not None]
        limits = [(fact.table_end, None if fact.rope is None else fact.rope.limit(shortest)) for fact in facts]
        self.target, self._rope = limits[0]
        self._smallest = min((size for pair in limits for size in pair if size is not None), default=None)

    def room(self, limits: list[int], lengths: list[int]) -> list[int]:
        """Lower `limits`, the draft limit of each row, to the positions that are left after all but the last token of
        `lengths[b] + 1`."""
        size = self._smallest
        return limits if size is None else [max(min(n, size - k - 1), 0) for n, k in zip(limits, lengths, strict=True)]

    def check(self, rows: Rows, name_row: Callable[[int], str]) -> None:
        """Raise `ValueError` if an unfinished row needs a position that the target does not have."""
        for b, length in enumerate(rows.cached_lengths()):
            if not rows.finished[b]:
                self.check_row(length, name_row(rows.row_id_list[b]))

    def check_row(self, length: int, name: str) -> None:
        """Raise `ValueError` if the last token of the row called `name`, which follows `length` others, has no position
        in the target."""
        if self._rope is not None and length >= self._rope:
            raise ValueError(
                f"the target's RoPE changes beyond {self._rope} tokens, and {name} has more, or crosses that: pass a "
                "smaller max_new_tokens or prompts on one side of it, or leave lossy_policy out"
            )
        if self.target is not None and length >= self.target:
            raise ValueError(
                f"the target has {self.target} positions, and {name} needs more: its text has {length + 1} tokens and "
                "no end. Pass a smaller max_new_tokens or a shorter prompt"
            )


@dataclass(frozen=True)
class TokenLogprobs:
    """Log p of one token under the target's raw logits, without temperature, top-k, top-p or grammar.

    Args:
        logprob: of the token.
        alternatives: the most likely tokens at its position with their log p, in descending order.
    """

    logprob: float
    alternatives: list[tuple[int, float]]


@dataclass(frozen=True)
class RowLogprobs:
    """The log-probabilities of one row. `alternatives`: how many to record at each position;
    `tokens`: one entry per new token."""

    alternatives: int
    tokens: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class Call:
    """One generate call, built by `generation.runner`. `rows`, the caches, and the state of stop, rule and drafter
    change as it runs."""

    rows: Rows
    target: TargetModel
    drafter: DrafterRun
    stop: StopRun
    rule: RuleRun
    policy: LossyPolicy
    processing: Processing
    randomness: Randomness
    clock: Clock
    positions: PositionLimits
    vocabulary: int  # size of the target's vocabulary
    sampling: bool = False  # False: greedy
    # For `StopRun.pair`: target, draft, kind of call.
    stop_context: tuple[PreTrainedModel, PreTrainedModel, Hashable] | None = None
    companion: RowModel | None = None  # read by the filter
    rule_tap: FeatureTap | None = None  # records the target's hidden states for the rule's head
    streamer: BaseStreamer | None = None
    on_round: Callable[[Verified, Verdict], None] | None = None  # called after each round, for measurements
    compiled: bool = False  # compile rounds where possible
    fixed_rows: bool = False  # every forward must contain all rows of the call, finished ones included
    keep_scores: bool = False
    keep_logits: bool = False
    scores: list[list[torch.Tensor]] = field(default_factory=list)  # per row: one (tokens, V) a round, processed
    logits: list[list[torch.Tensor]] = field(default_factory=list)  # same, raw
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)  # by row id, for rows that request them
    name_row: Callable[[int], str] = "row {}".format  # name of a row in error messages

    def __post_init__(self) -> None:
        self.models: list[Any] = [
            m for m in (self.target, *self.drafter.cached_models, self.companion) if m is not None
        ]
        # Uploads to the CPU cost nothing.
        self.devices = {self.rows.ids.device, *(model.device for model in self.models)} - {torch.device("cpu")}
        self.scores, self.logits = [[] for _ in self.rows.row_id_list], [[] for _ in self.rows.row_id_list]
        self.logprobs = {}
        self.dtype, self.lossless = dtype_of(self.target.model), self.policy.lossless

    def on_rows(
        self, rows: Rows, count: int, limit: int, stop: StopRun, processing: Processing, clock: Clock
    ) -> "Call":
        """Return a call like this one for other `rows`, on empty caches of `count` rows of up to `limit` tokens.

        Raises: `NotJoined`, one line, if a part of the call cannot change rows.
        """
        if not isinstance(self.target, RowModel):
            raise NotJoined("a target on Transformers' cache keeps the row that a call began with")
        return replace(
            self,
            rows=rows,
            stop=stop,
            processing=processing,
            clock=clock,
            target=self.target.fresh(count, limit),
            drafter=self.drafter.fresh(count, limit, stop, processing, clock),
            companion=None if self.companion is None else self.companion.fresh(count, limit),
        )

    def upload_places(self, limits: list[int]) -> None:
        """Upload the rows' positions and draft limits to all devices at once: a later upload would wait for the round's
        forwards."""
        if not self.devices:
            return
        rows, lists = self.rows, [self.rows.lengths, limits]
        for model in self.models:
            starts = [length + pad for length, pad in zip(model.lengths, rows.pads, strict=True)]
            uncached = [length - start for length, start in zip(rows.lengths, starts, strict=True)]
            lists += [model.lengths, starts, uncached]
        for device in self.devices:
            upload([values for values in lists if values is limits or len(set(values)) > 1], device)

    def make_stats(self, rows: list[RowStats]) -> SpeculationStats:
        """Return statistics of some of the call's rows."""
        stop = self.stop.settings
        falls_back = isinstance(stop, Fallback)
        return SpeculationStats(rows, stop.longest, self.lossless, dtype=self.dtype, falls_back=falls_back)

    def logprobs_of(self, b: int) -> list[TokenLogprobs] | None:
        """Return the log-probabilities of row b's new tokens; None if they are not requested."""
        wanted = self.logprobs.get(self.rows.row_id_list[b])
        return None if wanted is None else wanted.tokens

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *error: object) -> None:
        """Release model storage that outlives the call."""
        for model in (self.target, *self.drafter.cached_models):
            if isinstance(model, StaticRowModel):
                model.close()
        self.drafter.close()


@dataclass(frozen=True)
class RowParts:
    """The per-row state of a row to insert.

    Args:
        prompt: token ids.
        ends, end_tokens: when the text ends.
        processing: logits processors of a call with this row alone.
        generator: source of the row's random numbers.
        logprobs: the row's log-probabilities, if requested.
        memories: texts from which it may be drafted.
    """

    prompt: list[int]
    ends: RowEnds
    end_tokens: frozenset[int]
    processing: Processing
    generator: torch.Generator
    logprobs: RowLogprobs | None = None
    memories: Sequence[SuffixMemory] = ()


def with_places(call: Call, size: int, limit: int, clock: Clock, end_tokens: frozenset[int]) -> Call:
    """Return a call like `call` with up to `size` rows, added by `insert`, of about `limit` tokens. `clock` counts for
    all of them.

    Raises: `NotJoined`, one line, if a part of the call cannot change rows.
    """
    stop = _stop(call, size)
    for kind in (type(stop), type(call.rule)):
        if kind.__module__.partition(".")[0] != PACKAGE and "take" not in vars(kind):
            raise NotJoined(f"{kind.__name__} has no method take(row, other)")
    if call.compiled:
        raise NotJoined("compiled rounds keep the rows that a call began with")
    rows = call.rows.emptied(size, end_tokens)
    out = call.on_rows(rows, 0, limit, stop, RowProcessing(call.processing, size), clock)
    out.rule = call.policy.rule.start([rows.ids.new_zeros(1)] * size)
    out.randomness = Randomness([torch.Generator()] * size, size)
    return out


def with_prompts(call: Call, new: Sequence[RowParts]) -> Call:
    """Return a call like `call` that prefills the prompts of `new` rows."""
    row_ids, rows = range(len(new)), call.rows.emptied(len(new), call.rows.eos)
    rows.insert(row_ids, row_ids, [row.prompt for row in new], [row.ends for row in new])
    out = call.on_rows(rows, len(new), rows.max_length, call.stop, call.processing, call.clock)
    for model in out.models:
        model.reserve(max(rows.lengths) - 1)
    return out


def insert(call: Call, source: Call, rows: Sequence[int], new: Sequence[RowParts]) -> list[int]:
    """Move `rows` of the `source`, prefilled, into free slots or over finished rows;
    return their row ids in the call."""
    finished = [b for b, is_over in enumerate(call.rows.finished) if is_over][: len(rows)]
    free = [row_id for row_id in range(len(call.rows.finished_tokens)) if row_id not in call.rows.row_id_list]
    size, more = len(call.rows.row_id_list), len(rows) - len(finished)
    slots = [*finished, *range(size, size + more)]
    row_ids = [*(call.rows.row_id_list[b] for b in finished), *free[:more]]
    # Allocate first: if memory runs out, no row has been added.
    assert isinstance(call.target, RowModel) and isinstance(source.target, RowModel)
    call.target.insert(slots, source.target, rows)
    call.drafter.insert(slots, row_ids, source.drafter, rows)
    if call.companion is not None and source.companion is not None:
        call.companion.insert(slots, source.companion, rows)
    call.rows.insert(slots, row_ids, [row.prompt for row in new], [row.ends for row in new])
    assert isinstance(call.processing, RowProcessing)
    for row_id, row in zip(row_ids, new, strict=True):
        call.stop.take(row_id, _stop(call, 1))
        call.rule.take(row_id, call.policy.rule.start([torch.tensor(row.prompt, device=call.rows.ids.device)]))
        call.processing.insert(row_id, row.processing)
        call.randomness.insert(row_id, row.generator)
        call.logprobs.pop(row_id, None)
        call.rows.memories[row_id] = row.memories
        if row.logprobs is not None:
            call.logprobs[row_id] = row.logprobs
        row.ends.begin()
    return row_ids


def _stop(call: Call, rows: int) -> StopRun:
    """Start the call's stop for `rows` rows."""
    out = call.stop.settings.start(rows)
    if call.stop_context is not None:
        out.pair(*call.stop_context)
    return out
