"""The joint stop: all rows of a batch draft on while the expected gain is worth the time."""

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from ..registry.frozen import Amount, DraftLength, Factor, Positive
from ..tensors import on_device
from ..validation import check_number
from .base import DraftStop, Scores, StopRun, entropy
from .confidence import SVIP
from .constant import Constant
from .cost_model import EDGES, KEEP, SHORTEST, AcceptanceEstimate, PairMemory, RoundCosts, bins_of


class JointGoodput(DraftStop, name="joint_goodput"):
    """Draft one more token for all rows or end all drafts, by expected accepted tokens per second.

    After each drafted token the round continues while

        ā · Σ s^`exponent` ≥ ρ · (t_step + t_column),

    summed over the rows that may still draft. s is the probability that all of a row's drafted tokens are accepted, ā that of a future
    token; t_step is the cost of a draft step, t_column of verifying one more token of every row, and ρ the tokens per second of an average
    round. s only decreases, so once a step does not pay, no later one does.

    - s is the product of a(H) over the row's tokens, where H is the draft's entropy: SVIP's bound on the acceptance rate, 1 − √(c·H),
      corrected by the measured acceptance of tokens with similar entropy.
    - A single unfinished row uses `SVIP(h, c)`.
    - Compiled rounds decide after each block of drafted tokens, whose last token counts like the first.

    Seconds are measured, and the estimates for a pair of models carry over to their next call. Greedy text does not depend on them; sampled
    text for a given seed may, as draft lengths differ. With `step` nothing is measured, and calls are reproducible.

    Args:
        exponent: 1 weighs all expected tokens equally. A batch ends with its slowest row, so tokens that few rows gain are worth less.
        step, token, fixed: the costs of drafting one token for all rows, of verifying one more token, and of the rest of a round, in any
            common unit; measured if `step` is None.
    """

    h: Amount = SVIP.h
    c: Amount = SVIP.c
    max_draft: DraftLength = SVIP.max_draft
    exponent: Annotated[float, partial(check_number, low=0.0, high=100.0)] = 2.0
    step: Factor | None = None
    token: Factor = 0.0
    fixed: Positive = 1.0
    joint: ClassVar[bool] = True

    def start(self, rows: int) -> "JointRun":
        return JointRun(self)


class JointTensors(NamedTuple):
    """The inputs of a compiled round's decisions, on the device."""

    edges: torch.Tensor  # entropies that separate the bins
    factors: torch.Tensor  # (BINS,) float32: a token's factor of `worth`
    least: torch.Tensor  # () float32: all rows stop after the block if those that may draft are worth less


class JointRun(StopRun):
    """The run of `JointGoodput`. `estimates`: from earlier rounds; other attributes: the current round. `now`: clock in seconds.

    Decisions are computed on the draft's device, where a stopped row has weight 0 before the host knows: drafts do not depend on
    the number of tokens between device syncs.
    """

    settings: JointGoodput

    def __init__(self, settings: JointGoodput, now: Callable[[], float] = time.perf_counter):
        super().__init__(settings)
        self.now, self.alone = now, SVIP(settings.h, settings.c)
        self.estimates = JointEstimates(settings)
        self.edges = EDGES
        self.rows: Sequence[int] = []  # unfinished rows
        self.may: Sequence[int] = []  # those of `rows` that may draft another token
        self.order: list[int] = []  # call index of each row of the batch
        self.bins: list[torch.Tensor] = []  # (B,) for each drafted token
        self.seen: list[list[int]] = []  # the part of `bins` on the host
        self.moments: list[float] = []  # time of the round's start and of each drafted token
        self.since = 0.0  # time of the last sync, or of the draft's start
        self.open = -1  # number of rows that `counts` marks
        self.least: float | None = None  # break-even value of Σ s^exponent
        self.worth = self.factors = self.counts = torch.ones(0)  # see `_open`
        self.warm = False  # the models have prefilled
        self.padded = 0  # tokens drafted by a compiled round, all of which the target reads
        self.counted = 0  # drafted tokens of a row in the round that the target has read

    def pair(self, target: PreTrainedModel, draft: PreTrainedModel, kind: Hashable) -> None:
        if self.estimates.costs.measured:
            self.estimates = KNOWN.recall(target, draft, kind, self.estimates)

    def begin_round(self, rows: list[int]) -> list[int]:
        now = self.now()
        if self.counted:
            if self.warm:
                self.estimates.costs.learn(len(self.order), self.moments, now, self.counted)
            self.warm = True
        self.rows = self.may = rows
        self.bins, self.seen, self.moments, self.since = [], [], [now], now
        self.padded = self.counted = 0
        return super().begin_round(rows)

    def interrupted(self) -> None:
        self.counted = 0

    @property
    def may_run_ahead(self) -> bool:
        return self.is_of_package  # `stopped` replaces the information of `drafting`

    def drafting(self, rows: Sequence[int]) -> None:
        self.may = rows

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], **_: object
    ) -> torch.Tensor:
        if len(self.rows) == 1:
            return self.alone.should_stop(input_ids, scores)
        device = scores[-1].device
        if not self.bins:
            self._open(list(rows), device)
        bins = bins_of(entropy(scores[-1]), self.edges)
        self.bins.append(bins)
        if self.least is None:
            return torch.full((len(rows),), len(self.bins) >= Constant.gamma, device=device)
        self.worth = self.worth * self.factors[bins]
        if self.open != len(self.may):  # rows never rejoin
            self.open, may = len(self.may), set(self.may)
            self.counts = on_device([float(row in may) for row in self.order], device, torch.float32)
        return (self.worth @ self.counts < self.least).expand(len(rows))

    def stopped(self, stops: torch.Tensor) -> None:
        if self.bins:
            self.worth = self.worth.masked_fill(stops, 0.0)

    def read(self, answers: Sequence[torch.Tensor]) -> list[list[int]]:
        """Off the CPU, read the bins in the same sync."""
        out = super().read(answers) if answers[0].device.type == "cpu" else self._see(answers)
        self._share_seconds()
        return out

    def _see(self, answers: Sequence[torch.Tensor]) -> list[list[int]]:
        """Copy the unread bins and `answers` to the host in one sync; return `answers`."""
        new = [*(answer.long() for answer in answers), *self.bins[len(self.seen) :]]
        table: list[list[int]] = torch.stack(new).tolist() if new else []
        self.seen += table[len(answers) :]
        return table[: len(answers)]

    def _share_seconds(self) -> None:
        """Divide the time since the last sync equally among the tokens drafted since."""
        now, new = self.now(), len(self.bins) + 1 - len(self.moments)
        self.moments += [self.since + (now - self.since) * (i + 1) / new for i in range(new)]
        self.since = now

    def traced(self, rows: Sequence[int], device: torch.device, block: int) -> tuple[JointTensors | None, int]:
        """Begin a compiled round of `rows`; return its inputs (None: use `alone`) and a limit on drafted tokens, 0 for none.

        The round drafts `block` tokens between two decisions; each is worth ā^exponent of the one before.
        """
        if len(self.rows or rows) == 1:
            return None, 0
        self._open(list(rows), device)
        self.since = self.now()
        least, most = (-1.0, Constant.gamma) if self.least is None else (self.least, 0)
        falls = self.estimates.accepted.share**self.settings.exponent
        least *= block / sum(falls**slot for slot in range(block))
        return JointTensors(self.edges, self.factors, on_device([least], device, torch.float32)[0]), most

    def forget_round(self) -> None:
        """Restart the round's draft for eager stages."""
        self.bins, self.seen, self.moments, self.since, self.padded = [], [], self.moments[:1], self.now(), 0

    def drafted(self, bins: torch.Tensor) -> None:
        """Add the bins (B, n) of tokens drafted by a compiled round, after a sync."""
        self.bins += bins.unbind(dim=1)
        self.padded = len(self.bins)
        self._share_seconds()

    def _open(self, rows: list[int], device: torch.device) -> None:
        """Begin a draft: `worth` (B,) is s^exponent, `factors` (BINS,) a token's factor of it, `counts` (B,) 1 for rows that may draft."""
        self.order, self.open, self.edges = rows, -1, self.edges.to(device)
        self.worth = torch.ones(len(rows), device=device)
        factors = self.estimates.accepted.chances(self.settings.c) ** self.settings.exponent
        self.factors = on_device(factors.tolist(), device, torch.float32)
        self.least = self.estimates.least(len(rows), len(self.rows))

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        if not self.bins or not any(drafted):
            return
        self.counted = self.padded or max(drafted)
        self._see([])
        bins = np.array(self.seen).T[[self.order.index(row) for row in rows]]  # (B, γ)
        self.estimates.learn(bins, np.array(drafted), np.array(accepted))


class JointEstimates:
    """The estimates for a pair of models. `averages`: decayed sums over rounds of 1, of tokens per row, and of γ."""

    def __init__(self, settings: JointGoodput):
        self.costs = RoundCosts(settings.step, settings.token, settings.fixed)
        self.accepted = AcceptanceEstimate()
        self.averages = np.zeros(3)

    def learn(self, bins: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Add a round. Arguments as in `AcceptanceEstimate.learn`."""
        self.accepted.learn(bins, drafted, accepted)
        self.averages = KEEP * self.averages + (1.0, float(accepted.mean()) + 1, int(drafted.max()))

    def least(self, batch: int, unfinished: int) -> float | None:
        """Return `JointRun.least` for a batch with `unfinished` rows; None while costs are unknown."""
        if not self.costs.ready:
            return None
        more = self.costs.step(batch) + self.costs.column(batch)
        count, tokens, gamma = self.averages.tolist()
        if not count:
            return None if more > 0 else 0.0
        seconds = max(self.costs.round(batch, gamma / count), SHORTEST)
        return unfinished * tokens / count / seconds * more / self.accepted.share


KNOWN: PairMemory[JointEstimates] = PairMemory()
