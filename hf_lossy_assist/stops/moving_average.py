"""A stop that plans γ from measured acceptance and the costs of rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..artifacts.sv_profile import LONGEST_PROFILED, Profile
from ..registry import register_stop
from ..validation import MOST_FACTOR, check_int, check_number, check_positive, shown
from .base import DraftStop, StopRun


UNPROFILED = 10  # longest draft to consider if costs are given as numbers
LEAST = 1e-9  # lower bound of a round's cost, as a divisor


@dataclass(frozen=True)
class MovingAverage(DraftStop):
    """Choose the next round's γ by expected goodput, in tokens per second, from a moving average of acceptance.

    Liu et al., SmartSpec (huggingface.co/papers/2406.14066). If a share α of a row's tested tokens is accepted, γ drafted tokens yield
    (1 − α^(γ+1))/(1 − α) expected tokens. The γ of all rows maximise the sum of these divided by the round's seconds T. γ = 0 drafts nothing.

    - α = (accepted + `initial`)/(tested + 1), where each round weighs 1 − 1/`window` of the next one; tested are the accepted tokens
      and the first rejected one. Old rounds fade, so that a row at γ = 0 is tried again.
    - T is taken from `profile`, or is `fixed` + `step` · (the longest γ) + `token` · (the sum of all γ), in any common unit.

    Args:
        profile (`Profile`, *optional*): costs of rounds on this machine, from `hf-lossy profile`.
        step, token, fixed: without a profile, the costs of drafting one token for all rows, of verifying one more token, and of the rest.
        per: "row": a γ for each row; "batch": one γ, from the mean over the rows.
        window: number of rounds to average over, approximately.
        initial: the share assumed before the first round.
        max_draft: the maximum tokens of one round; None: the profiled maximum, without a profile 10.
    """

    profile: Profile | None = None
    step: float | None = None
    token: float = 0.0
    fixed: float = 1.0
    per: str = "row"
    window: int = 20
    initial: float = 0.7
    max_draft: int | None = None
    adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.profile is not None and not isinstance(self.profile, Profile):
            raise TypeError(f"MovingAverage.profile: expected a Profile, got {type(self.profile).__name__}")
        if (self.profile is None) == (self.step is None):
            raise ValueError(
                "MovingAverage: what do rounds cost? Pass either profile=… (hf-lossy profile) or step=… with token=… and fixed=…"
            )
        if self.step is not None:
            check_number("MovingAverage.step", self.step, 0.0, MOST_FACTOR)
        check_number("MovingAverage.token", self.token, 0.0, MOST_FACTOR)
        check_positive("MovingAverage.fixed", self.fixed, hint=": a round without drafts takes time too")
        if self.fixed < LEAST:
            raise ValueError(f"MovingAverage.fixed: expected a number of at least {LEAST:g}, got {self.fixed}")
        if self.per not in ("row", "batch"):
            raise ValueError(f'MovingAverage.per: expected "row" or "batch", got {shown(self.per)}')
        check_int("MovingAverage.window", self.window, 1)
        check_number("MovingAverage.initial", self.initial, 0.0, 1.0)
        if self.max_draft is not None:
            check_int("MovingAverage.max_draft", self.max_draft, 1, LONGEST_PROFILED)
            if self.profile is not None and self.max_draft > self.profile.gamma:
                raise ValueError(
                    f"MovingAverage.max_draft: {self.max_draft} tokens a round, and the profile was measured up to {self.profile.gamma}: "
                    f"pass at most that, or profile with --gamma {self.max_draft}"
                )

    @property
    def longest(self) -> int:
        if self.max_draft is not None:
            return self.max_draft
        return UNPROFILED if self.profile is None else self.profile.gamma

    def check(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        if self.profile is None:
            return
        if draft is None:
            raise ValueError(
                "this profile's seconds are those of a draft model: without assistant_model=…, pass MovingAverage(step=…)"
            )
        self.profile.check(target, draft, None, tokenizer)

    def start(self, rows: int) -> "MovingAverageRun":
        return MovingAverageRun(self, rows)

    def seconds(self, rows: int, gamma: int) -> np.ndarray:
        """Return T of a round of `rows` rows that drafts `gamma` tokens and verifies 0, 1, … `rows`·`gamma`, float64."""
        if self.profile is None:
            assert self.step is not None, "checked when it was made"
            return self.fixed + gamma * self.step + self.token * np.arange(rows * gamma + 1)
        latency = self.profile.latency
        observed = latency.of(rows, gamma)
        return observed - (observed[-1] - latency.unobserved(rows, gamma))


class MovingAverageRun(StopRun):
    """The run of `MovingAverage`. `accepted`, `rejected`: decayed counts of every row's tested tokens."""

    settings: MovingAverage
    row_lists: ClassVar[tuple[str, ...]] = ("accepted", "rejected")

    def __init__(self, settings: MovingAverage, rows: int):
        super().__init__(settings)
        self.accepted, self.rejected = [0.0] * rows, [0.0] * rows
        self._seconds: dict[int, list[np.ndarray]] = {}  # rows → `settings.seconds` for γ = 0, 1, …

    def begin_round(self, rows: list[int]) -> list[int]:
        if not rows:
            return []
        settings = self.settings
        n = np.array([(self.accepted[row], self.rejected[row]) for row in rows])  # (B, 2)
        if settings.per == "batch":
            n = n.mean(axis=0, keepdims=True)
        alpha = (n[:, 0] + settings.initial) / (n.sum(axis=1) + 1)
        if len(rows) not in self._seconds:
            self._seconds[len(rows)] = [settings.seconds(len(rows), gamma) for gamma in range(settings.longest + 1)]
        choose = choose_for_rows if settings.per == "row" else choose_for_batch
        return choose(np.broadcast_to(alpha, len(rows)), self._seconds[len(rows)])

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        keep = 1 - 1 / self.settings.window
        for row, d, n in zip(rows, drafted, accepted, strict=True):
            self.accepted[row] = keep * self.accepted[row] + n
            self.rejected[row] = keep * self.rejected[row] + (n < d)


def choose_for_batch(alpha: np.ndarray, seconds: Sequence[np.ndarray]) -> list[int]:
    """Return the γ of the highest goodput, the shortest on a tie, for each row: `alpha` (B,) float64, `seconds[γ]` (B·γ + 1,)."""
    tokens = [sum((alpha**i).sum() for i in range(gamma + 1)) for gamma in range(len(seconds))]
    goodput = [expected / s[-1] for expected, s in zip(tokens, seconds, strict=True)]
    return [int(np.argmax(goodput))] * len(alpha)


def choose_for_rows(alpha: np.ndarray, seconds: Sequence[np.ndarray]) -> list[int]:
    """Return the γ of each row that jointly maximise goodput, the shortest on a tie. Arguments as in `choose_for_batch`.

    For each longest γ, the batch's drafted tokens are taken in order of their probability of acceptance, as many as pay.
    """
    best, chosen = len(alpha) / float(seconds[0][0]), np.zeros(len(alpha), dtype=np.int64)
    for gamma in range(1, len(seconds)):
        gains = np.cumprod(np.repeat(alpha[:, None], gamma, axis=1), axis=1).reshape(-1)  # (B·γ,) α, α², … of each row
        order = np.argsort(-gains, kind="stable")  # stable: a row's tokens keep their order
        goodput = (len(alpha) + np.cumsum(gains[order])) / seconds[gamma][1:]
        most = int(np.argmax(goodput))
        if goodput[most] > best:
            best, chosen = goodput[most], np.bincount(order[: most + 1] // gamma, minlength=len(alpha))
    return [int(n) for n in chosen]


register_stop("moving_average", MovingAverage, paper="2406.14066")
