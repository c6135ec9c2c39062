"""A verify filter without a companion: cut drafted blocks where one more token is not worth the seconds of verifying it."""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from ..models.cached_model import CachedModel
from ..models.row_model import RowModel
from ..registry.frozen import Factor, Positive
from ..round import Draft, Selection
from ..rules.acceptance import RandomSource
from ..stops.cost_model import MeasuredCosts, PairMemory, RoundCosts
from .base import FilterRun, VerifyFilter
from .survival import Survival, cut, describe


WARM = 8  # rounds of a pair before anything is cut
EXPLORE = 32  # every so many rounds nothing is cut, so that the acceptance of later places stays known
WASTED = 4  # a block is expected to lose one token in so many to the cut


class AdaptiveTrim(VerifyFilter, name="trim"):
    """Verify a drafted token while the expected gain in accepted tokens is worth the cost.

    With π the probability that a token and all before it are accepted, ρ the tokens per second of an average round and t the seconds of
    verifying one token, each row is cut before its first token with π < ρ·t. If the target also reads the padding of shorter rows, all
    rows are cut before the first column with Σ π < B·ρ·t instead.

    - π is a product of logistic estimates, learned online from the draft's confidence and the place in the block.
    - ρ and t are measured in earlier rounds of the pair, and carry over to the next call.

    Whether a token is verified depends on the tokens before it and on the draft's distribution at its place, never on the token itself,
    so that the token after a cut is drawn from the target's distribution. Greedy text does not depend on the clock; sampled text for a
    given seed may. With `step` nothing is measured.

    Args:
        step, token, fixed: the costs of drafting one token for all rows, of verifying one more token, and of the rest of a round, in any
            common unit; measured if `step` is None. `token` 0 cuts nothing.
    """

    step: Factor | None = None
    token: Factor = 0.0
    fixed: Positive = 1.0
    reads_probs: ClassVar[bool] = True
    trims: ClassVar[bool] = True

    def start(self) -> "TrimRun":
        return TrimRun(self)

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        """Select as in the first round of a call."""
        return self.start().select(draft, companion, randomness)


class TrimEstimates(RoundCosts):
    """Estimates for a pair of models."""

    def __init__(self, settings: AdaptiveTrim):
        super().__init__(settings.step, settings.token, settings.fixed)
        self.survival: Survival | None = None
        self.rounds = 0

    def price(self, rows: int, unfinished: int) -> float:
        """Return ρ·t, in tokens, for a batch of `rows` rows; 0 while it is unknown and in rounds that explore."""
        if self.rounds < WARM or self.rounds % EXPLORE == 0 or not self.costs.known:
            return 0.0
        return (self.rate(rows.bit_length(), rows, unfinished) or 0.0) * self.costs.column(1)


class TrimRun(FilterRun):
    """The run of `AdaptiveTrim`. `known`: estimates from earlier rounds; other attributes: the current round. `now`: clock in seconds."""

    settings: AdaptiveTrim

    def __init__(self, settings: AdaptiveTrim, now: Callable[[], float] = time.perf_counter):
        super().__init__(settings)
        self.now, self.known = now, TrimEstimates(settings)
        self.unfinished = 1
        self.target: CachedModel | None = None
        self.began = self.drafted = 0.0  # times of the round's start and of the end of its draft
        self.features = torch.empty(0)
        self.warm = False  # the models have prefilled

    def pair(self, target: PreTrainedModel, draft: PreTrainedModel, kind: Hashable) -> None:
        if isinstance(self.known.costs, MeasuredCosts):
            self.known = KNOWN.recall(target, draft, kind, self.known)

    def begin_round(self, unfinished: int, target: CachedModel | None) -> None:
        self.unfinished, self.target, self.began = unfinished, target, self.now()

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        rows, estimates, self.drafted = len(draft.tokens), self.known, self.now()
        if draft.gamma == 0:
            return Selection(draft, draft.lengths, sends_all=True)
        self.features = describe(draft)
        estimates.survival = estimates.survival or Survival(draft.tokens.device)
        price = estimates.price(rows, self.unfinished)
        if price == 0:
            return Selection(draft, draft.lengths, sends_all=True)
        # This must be known before the round: the padding of a block depends on tokens after those that the filter decides on.
        ragged = isinstance(self.target, RowModel) and self.target.skips_padding(rows * draft.planned / WASTED)
        token, column = (price, 0.0) if ragged else (0.0, rows * price)
        sent = cut(estimates.survival.of(self.features), draft.lengths, token, column)
        return Selection(draft, sent, counts=sent.tolist())

    def observe(self, selection: Selection, accepted: torch.Tensor, total: int) -> None:
        end, draft, estimates = self.now(), selection.draft, self.known
        rows, gamma = draft.tokens.shape
        if gamma == 0 or estimates.survival is None:
            return
        estimates.survival.learn(self.features, selection.sent, accepted)
        read = float(gamma) if selection.counts is None else self._read(selection.counts)
        if self.warm:
            step = (self.drafted - self.began) / gamma
            estimates.costs.learn(rows, [self.began + i * step for i in range(gamma + 1)], end, read)
        self.warm = True
        estimates.add(rows.bit_length(), total / self.unfinished + 1, gamma, read)
        estimates.rounds += 1

    def _read(self, counts: Sequence[int]) -> float:
        """Return how many drafted tokens the target has read, as an average over the rows, with padding unless it skips that."""
        padding = len(counts) * max(counts) - sum(counts)
        skips = isinstance(self.target, RowModel) and self.target.skips_padding(padding)
        return sum(counts) / len(counts) if skips else float(max(counts))


KNOWN: PairMemory[TrimEstimates] = PairMemory()
