"""Stops without training, on the drafted token's probability or the draft's entropy, with fixed or adaptive thresholds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..registry import register_stop
from ..uploads import on_device
from ..validation import LONGEST_DRAFT, check_int, check_number, shown
from .base import DraftStop, Scores, StopRun, entropy


FEWEST = 6  # tested tokens of a row before DISCO adapts its threshold


@dataclass(frozen=True)
class Confidence(DraftStop):
    """Stop after a token whose draft probability is below `threshold`; Transformers' `assistant_confidence_threshold`.

    `threshold=0` never stops early. Transformers' default is 0.4 with at most 20 tokens. `reads="head"` compares what the drafter estimates
    itself, the probability that its token is accepted: the confidence head of DSpark (huggingface.co/papers/2607.05147), whose authors drop
    the doubtful token.
    """

    threshold: float = 0.4
    max_draft: int = 20
    reads: str = "probability"

    def __post_init__(self) -> None:
        check_number("Confidence.threshold", self.threshold, 0.0, 1.0)
        check_int("Confidence.max_draft", self.max_draft, 1, LONGEST_DRAFT)
        if self.reads not in ("probability", "head"):
            raise ValueError(f'Confidence.reads: expected "probability" or "head", got {shown(self.reads)}')

    @property
    def reads_confidence(self) -> bool:
        return self.reads == "head"

    def check(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        if self.reads_confidence and not getattr(draft, "gives_confidence", False):
            raise ValueError(
                f'Confidence(reads="head") stops by a DSpark drafter\'s confidence head, and {type(draft).__name__} has none: leave reads out'
            )

    def should_stop(
        self, input_ids: torch.Tensor, scores: Scores, features: torch.Tensor | None = None, **kwargs: object
    ) -> torch.Tensor:
        if not self.reads_confidence:
            return token_probability(input_ids, scores) < self.threshold
        if features is None:
            raise ValueError(
                'Confidence(reads="head"): this loop passes no confidence of the drafter on: leave reads out'
            )
        return ~(features[:, 0] >= self.threshold)  # NaN stops too


def token_probability(input_ids: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Return q(x) of the last drafted token, (B,) float32. Arguments as in `StopRun.after_token`."""
    q = scores[-1].float().softmax(dim=-1)
    return q.gather(-1, input_ids[:, -1:].to(q.device)).squeeze(-1)


@dataclass(frozen=True)
class SVIP(DraftStop):
    """Stop after a token whose draft entropy H makes acceptance unlikely: √(c·H) > h, H in nats.

    Zhang et al., SVIP (huggingface.co/papers/2411.18462), Eq. 6: the acceptance rate is at least about 1 − √(c·H). Two forms:

    - `form="bound"` (the authors' code): √(c·H) > h with c = 0.15, h = 0.3, i.e. H > 0.60 nats;
    - `form="entropy"` (Eq. 7 taken literally): √H > h; with the paper's h = 0.3, i.e. H > 0.09 nats.

    The uncertain token stays in the draft, which has 1 to `max_draft` tokens (40 in the paper). `h=math.inf` never stops early.
    """

    h: float = 0.3
    c: float = 0.15
    form: str = "bound"
    max_draft: int = 40

    def __post_init__(self) -> None:
        check_number("SVIP.h", self.h, 0.0, math.inf)
        check_number("SVIP.c", self.c, 0.0, math.inf)
        check_int("SVIP.max_draft", self.max_draft, 1, LONGEST_DRAFT)
        if self.form not in ("bound", "entropy"):
            raise ValueError(f'SVIP.form: expected "bound" (√(c·H) > h) or "entropy" (√H > h), got {shown(self.form)}')

    def should_stop(self, input_ids: torch.Tensor, scores: Scores, **kwargs: object) -> torch.Tensor:
        scale = self.c if self.form == "bound" else 1.0
        return (scale * entropy(scores[-1])).sqrt() > self.h


@dataclass(frozen=True)
class AdaEDL(DraftStop):
    """Stop after a token whose draft entropy H gives too low an acceptance bound: 1 − √(`scale`·H) < λ, H in nats.

    Agrawal et al. (huggingface.co/papers/2410.18351). After each round λ is adapted to the row's acceptance rate r with the update rule and
    constants of Draft & Verify (huggingface.co/papers/2309.08168):

        r̄ ← β₁·r̄ + (1 − β₁)·r,   λ ← β₂·λ + (1 − β₂)·(λ + sign(`goal` − r̄)·ε),   β₁ = 0.5, β₂ = 0.9, ε = 0.01

    Initially λ is `threshold` and r̄ is `goal`; λ stays in [0, 1]. With ε = 0 this is SVIP with h = 1 − λ. `scale=0` never stops early.
    """

    threshold: float = 0.6
    scale: float = 0.2
    goal: float = 0.9
    epsilon: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9
    max_draft: int = 20

    def __post_init__(self) -> None:
        check_number("AdaEDL.scale", self.scale, 0.0, float("inf"))
        for name in ("threshold", "goal", "epsilon", "beta1", "beta2"):
            check_number(f"AdaEDL.{name}", getattr(self, name), 0.0, 1.0)
        check_int("AdaEDL.max_draft", self.max_draft, 1, LONGEST_DRAFT)

    def start(self, rows: int) -> "AdaEDLRun":
        return AdaEDLRun(self, rows)


class AdaEDLRun(StopRun):
    """The run of `AdaEDL`. `thresholds`: λ of every row of the call; `rates`: r̄."""

    settings: AdaEDL
    row_lists: ClassVar[tuple[str, ...]] = ("thresholds", "rates")

    def __init__(self, settings: AdaEDL, rows: int):
        super().__init__(settings)
        self.thresholds, self.rates = [settings.threshold] * rows, [settings.goal] * rows

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], **_: object
    ) -> torch.Tensor:
        bound = 1 - (self.settings.scale * entropy(scores[-1])).sqrt()  # (B,)
        return bound < on_device([self.thresholds[row] for row in rows], bound.device, torch.float32)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        settings = self.settings
        for row, d, n in zip(rows, drafted, accepted, strict=True):
            if d == 0:
                continue
            rate = self.rates[row] = settings.beta1 * self.rates[row] + (1 - settings.beta1) * n / d
            step = (1 - settings.beta2) * float(np.sign(settings.goal - rate)) * settings.epsilon
            self.thresholds[row] = min(max(self.thresholds[row] + step, 0.0), 1.0)


@dataclass(frozen=True)
class DISCO(DraftStop):
    """Stop after a token whose draft probability is below a threshold that is refitted after every round.

    Mamou et al. (huggingface.co/papers/2405.04304), in Transformers' form: the threshold is the q(x) of a tested token that minimises

        cost(t) = share of the rejected tokens with q(x) ≥ t + `missed` · share of the accepted ones with q(x) < t

    once a row has six tested tokens, some accepted and some rejected. Until then it is `Confidence(threshold)`.
    """

    threshold: float = 0.4
    missed: float = 3.0
    max_draft: int = 20

    def __post_init__(self) -> None:
        check_number("DISCO.threshold", self.threshold, 0.0, 1.0)
        check_number("DISCO.missed", self.missed, 0.0, 1e6)
        check_int("DISCO.max_draft", self.max_draft, 1, LONGEST_DRAFT)

    def start(self, rows: int) -> "DISCORun":
        return DISCORun(self, rows)


class DISCORun(StopRun):
    """The run of `DISCO`. `thresholds`: of every row of the call; `tested`: (q(x), accepted) of each row's tested tokens."""

    settings: DISCO
    row_lists: ClassVar[tuple[str, ...]] = ("thresholds", "tested")

    def __init__(self, settings: DISCO, rows: int):
        super().__init__(settings)
        self.thresholds = [settings.threshold] * rows
        self.tested: list[list[tuple[float, bool]]] = [[] for _ in range(rows)]
        self._steps: list[tuple[list[int], torch.Tensor]] = []  # of this round: rows and their q(x) (B,)

    def begin_round(self, rows: list[int]) -> list[int]:
        self._steps.clear()
        return super().begin_round(rows)

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], **_: object
    ) -> torch.Tensor:
        q = token_probability(input_ids, scores)
        self._steps.append((list(rows), q))
        return q < on_device([self.thresholds[row] for row in rows], q.device, torch.float32)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        if not self._steps:
            return
        drawn = dict(zip(self._steps[0][0], torch.stack([q for _, q in self._steps], dim=1).tolist(), strict=True))
        for row, d, n in zip(rows, drafted, accepted, strict=True):
            verdicts = [True] * n + [False] * (n < d)  # tokens after the first rejected one were not tested
            self.tested[row] += zip(drawn[row], verdicts, strict=False)
            if len(self.tested[row]) >= FEWEST:
                probabilities, labels = zip(*self.tested[row], strict=True)
                fitted = cheapest(probabilities, labels, self.settings.missed)
                self.thresholds[row] = self.thresholds[row] if fitted is None else fitted


def cheapest(q: object, accepted: object, missed: float) -> float | None:
    """Return DISCO's threshold for tokens with probability `q` (N,) and labels `accepted` (N,) bool; the highest on a tie.

    None if all or none were accepted, where one of the shares is undefined.
    """
    q, accepted = np.asarray(q, dtype=np.float64), np.asarray(accepted, dtype=bool)
    if accepted.all() or not accepted.any():
        return None
    levels = np.unique(q)[::-1]  # descending
    passes = q >= levels[:, None]  # (levels, N)
    let = (passes & ~accepted).sum(axis=1) / (~accepted).sum()
    lost = (~passes & accepted).sum(axis=1) / accepted.sum()
    return float(levels[np.argmin(let + missed * lost)])


register_stop("confidence", Confidence, paper="Transformers")
register_stop("svip", SVIP, paper="2411.18462")
register_stop("disco", DISCO, paper="2405.04304")
register_stop("adaedl", AdaEDL, paper="2410.18351")
