"""Everything that one generate call works with."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..artifacts.features import FeatureTap
from ..batch.logits_processing import Processing
from ..batch.logprobs import RowLogprobs, TokenLogprobs
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..drafters.base import DrafterRun
from ..models.cached_model import CachedModel
from ..models.compiled.static_model import StaticRowModel
from ..models.introspection import learned_positions
from ..models.quirks.cache_positions import PositionSources
from ..models.quirks.rope import renewing
from ..models.row_model import RowModel
from ..policy.policy import LossyPolicy
from ..round import Verdict, Verified
from ..rules import RuleRun
from ..stats.clock import Clock
from ..stops import StopRun
from ..uploads import upload


class PositionLimits:
    """Tables of positions, such as GPT-2's: no text grows past the target's, and no draft past any."""

    def __init__(self, target: PreTrainedModel, *others: object):
        """`target` and `others` are Transformers models; None among `others` is passed over."""
        self.target = learned_positions(target)
        self._columns = bool(PositionSources.of(target).tables)  # hidden tokens have positions of the target's, too
        tables = [learned_positions(model) for model in others if model is not None]
        self._shortest = min((size for size in tables if size is not None), default=None)

    def _last(self, rows: Rows) -> list[int]:
        """Return the target's position of each row's last token."""
        return [length - 1 for length in rows.lengths] if self._columns else rows.cached_lengths()

    def room(self, rows: Rows, limits: list[int]) -> list[int]:
        """Lower `limits`, the tokens that each row may draft, to what the tables have room for."""
        return self.room_behind(limits, self._last(rows), rows.cached_lengths())

    def room_behind(self, limits: list[int], last: list[int], cached: list[int]) -> list[int]:
        """Do so behind a row's last token at position `last` of the target and at `cached` of the others."""
        for size, places in ((self.target, last), (self._shortest, cached)):
            if size is not None:
                limits = [max(min(n, size - place - 1), 0) for n, place in zip(limits, places, strict=True)]
        return limits

    def check(self, rows: Rows, name_row: Callable[[int], str]) -> None:
        """Raise `ValueError` where a row needs a position that the target does not have."""
        for row, last, finished in zip(rows.row_id_list, self._last(rows), rows.finished, strict=True):
            if not finished:
                self.check_place(last, name_row(row))

    def check_place(self, last: int, name: str) -> None:
        """Raise `ValueError` where the last token of the row called `name` stands at a position that the target does not have."""
        if self.target is not None and last >= self.target:
            raise ValueError(
                f"the target has {self.target} positions, and {name} needs more: its text has {last + 1} tokens and no end. "
                f"Pass a smaller max_new_tokens or a shorter prompt"
            )


@dataclass
class Call:
    """Built by `generation.runner`; what changes during the call are `rows`, the caches, and what stop, rule and drafter count."""

    rows: Rows
    target: CachedModel
    drafter: DrafterRun
    stop: StopRun
    rule: RuleRun
    policy: LossyPolicy
    processing: Processing
    randomness: Randomness
    clock: Clock
    positions: PositionLimits
    vocabulary: int  # how many token ids the target has
    sampling: bool = False  # the call draws its tokens
    stop_context: tuple[Any, Any, Hashable] | None = None  # of the stop: target, draft, kind of call
    companion: RowModel | None = None  # that the filter reads
    rule_tap: FeatureTap | None = None  # on the target, where the rule's head reads its hidden states
    streamer: BaseStreamer | None = None
    on_round: Callable[[Verified, Verdict], None] | None = None  # is shown each round; for measuring
    compiled: bool = False  # rounds are to be compiled where they can be
    compiled_batch_sizes: tuple[int, ...] | None = None  # that were compiled ahead; None: powers of two
    fixed_rows: bool = False  # every forward must have all rows of the call, finished ones too
    keep_scores: bool = False
    keep_logits: bool = False
    scores: list[list[torch.Tensor]] = field(default_factory=list)  # of each row: (tokens of a round, V) processed
    logits: list[list[torch.Tensor]] = field(default_factory=list)  # the same, raw
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)  # by the row of the call, of rows that want them
    name_row: Callable[[int], str] = "row {}".format  # what errors call a row of the call

    def __post_init__(self) -> None:
        self.rope_models = renewing(self.target, *self.drafter.cached_models, self.companion)
        self.models = [m for m in (self.target, *self.drafter.cached_models, self.companion) if m is not None]
        # Beside the CPU, where uploads cost nothing.
        self.devices = {self.rows.ids.device, *(model.device for model in self.models)} - {torch.device("cpu")}
        # A row is written anew by a forward of its own, which would be given row 0's adapter.
        changes = [rope.renewed_after for _, rope in self.rope_models if rope.renewed_after is not None]
        if self.fixed_rows and len(self.rows.row_id_list) > 1 and changes and self.rows.max_length > min(changes):
            raise ValueError(
                f"adapter_names gives each row its adapter, and this model's RoPE changes beyond {min(changes)} tokens for each row by "
                "itself: end the texts before that, or generate the rows of one adapter at a time with set_adapter"
            )
        self.scores, self.logits = [[] for _ in self.rows.row_id_list], [[] for _ in self.rows.row_id_list]
        self.logprobs = {}

    def upload_places(self, limits: list[int]) -> None:
        """Tell the devices where the rows stand and how much they may draft, all at once: a later upload would wait for the round's forwards."""
        if not self.devices:
            return
        rows, lists = self.rows, [self.rows.lengths, limits]
        for model in self.models:
            starts = [held + pad for held, pad in zip(model.lengths, rows.pads, strict=True)]
            behind = [length - start for length, start in zip(rows.lengths, starts, strict=True)]
            lists += [model.lengths, starts, behind]
        for device in self.devices:
            upload([values for values in lists if values is limits or len(set(values)) > 1], device)

    def logprobs_of(self, b: int) -> list[TokenLogprobs] | None:
        """Return the log-probabilities of row b's new tokens; None where they are not wanted."""
        wanted = self.logprobs.get(self.rows.row_id_list[b])
        return None if wanted is None else wanted.tokens

    def close(self) -> None:
        """Give back the storage of models that outlives the call, however it ended."""
        for model in (self.target, *self.drafter.cached_models):
            if isinstance(model, StaticRowModel):
                model.close()
        self.drafter.close()
