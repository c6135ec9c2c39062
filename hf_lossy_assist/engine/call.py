"""Everything that one generate call works with."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..artifacts.features import FeatureTap
from ..batch.logits_processing import Processing
from ..batch.position_limits import PositionLimits
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..drafters.base import DrafterRun
from ..models.cached_model import CachedModel
from ..models.quirks.rope import renewing
from ..models.row_model import RowModel
from ..models.static import StaticRowModel
from ..policy.policy import LossyPolicy
from ..round import Verdict, Verified
from ..rules import RuleRun
from ..stats.clock import Clock
from ..stops import StopRun


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
    stop_context: tuple[Any, Any, Hashable] | None = None  # what the stop was told of: target, draft, kind of call
    companion: RowModel | None = None  # that the filter reads
    rule_tap: FeatureTap | None = None  # on the target, where the rule's head reads its hidden states
    streamer: Any = None
    on_round: Callable[[Verified, Verdict], None] | None = None  # is shown each round; for measuring
    compiled: bool = False  # rounds are to be compiled where they can be
    compiled_batch_sizes: tuple[int, ...] | None = (
        None  # numbers of rows that were compiled ahead; None: powers of two
    )
    fixed_rows: bool = False  # every forward must have all rows of the call, finished ones too
    keep_scores: bool = False
    keep_logits: bool = False
    scores: list[list[torch.Tensor]] = field(default_factory=list)  # of each row: (tokens of a round, V) processed
    logits: list[list[torch.Tensor]] = field(default_factory=list)  # the same, raw

    def __post_init__(self) -> None:
        self.rope_models = renewing(self.target, *self.drafter.cached_models, self.companion)
        # A row is written anew by a forward of its own, which would be given row 0's adapter.
        changes = [rope.renewed_after for _, rope in self.rope_models if rope.renewed_after is not None]
        if self.fixed_rows and len(self.rows.row_id_list) > 1 and changes and self.rows.max_length > min(changes):
            raise ValueError(
                f"adapter_names gives each row its adapter, and this model's RoPE changes beyond {min(changes)} tokens for each row by "
                "itself: end the texts before that, or generate the rows of one adapter at a time with set_adapter"
            )
        self.scores, self.logits = [[] for _ in self.rows.row_id_list], [[] for _ in self.rows.row_id_list]

    def close(self) -> None:
        """The call is over, in whatever way: its models give back storage that outlives it."""
        for model in (self.target, *self.drafter.cached_models):
            if isinstance(model, StaticRowModel):
                model.close()
