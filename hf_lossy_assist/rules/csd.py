"""A rule that remembers which tokens of the draft keep being rejected for which of the target's."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..registry import register_rule
from ..round import Verdict, Verified
from ..validation import check_int, check_number, shown
from .base import AcceptanceRule, RuleRun


Pair = tuple[int, int]


@dataclass(frozen=True)
class CSD(AcceptanceRule):
    """Accept a mismatch that came up before, where the target finds the drafted token nearly as likely as its own.

    A mismatch is a pair: the target's choice y = argmax p and the drafted x. a(x) = 1 where x was rejected for y at least `seen` times and
    p(x) > `ratio`·p(y), else strict; greedy the same; r = norm((p − q)⁺) (calibrated speculative decoding,
    huggingface.co/papers/2604.13634: its correction memory and its gate of probability ratios). A row remembers its own rejections in this
    call, beside the pairs of `known`, so what it writes does not depend on the rows beside it. Neutral: ratio 1.

    Args:
        ratio: of probabilities, 0 to 1.
        seen: rejections after which a pair may pass. The default is this package's.
        known: pairs (y, x) of token ids that may pass from the start, such as those of earlier calls.
    """

    ratio: float
    seen: int = 2
    known: tuple[Pair, ...] = ()
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("CSD.ratio", self.ratio, 0.0, 1.0)
        check_int("CSD.seen", self.seen, 1)
        pairs = self.known
        if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
            raise TypeError(
                f"CSD.known: expected pairs of token ids, the target's and the draft's, such as ((5, 9),), got {shown(pairs)}"
            )
        for pair in pairs:
            for token in pair:
                check_int("CSD.known", token, 0)
        object.__setattr__(self, "known", tuple((y, x) for y, x in pairs))  # JSON has lists

    def start(self, prompts: Sequence[torch.Tensor]) -> "CSDRun":
        return CSDRun(self)

    def near(self, verified: Verified) -> torch.Tensor:
        """Where p(x) > `ratio`·p(y), (B, γ) bool."""
        choice = verified.argmax[:, : verified.draft.gamma, None]
        best = verified.logits.gather(-1, choice).squeeze(-1)
        return (verified.at_tokens(verified.logits) - best).exp() > self.ratio


class CSDRun(RuleRun):
    """What each row of a call had rejected."""

    rule: CSD

    def __init__(self, rule: CSD):
        super().__init__(rule)
        self.rejected: dict[int, Counter[Pair]] = {}  # by the row of the call

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        return self.rule.accepts(verified, coins) | (self._known(verified) & self.rule.near(verified))

    def observe(self, verified: Verified, verdict: Verdict) -> None:
        ended = zip(verified.row_ids.tolist(), verdict.accepted.tolist(), verified.sent.tolist(), strict=True)
        pairs = self._pairs(verified)
        for b, (row, accepted, sent) in enumerate(ended):
            if accepted < sent and pairs[b][accepted][0] != pairs[b][accepted][1]:
                self.rejected.setdefault(row, Counter())[pairs[b][accepted]] += 1

    def take(self, row: int, other: RuleRun) -> None:
        assert isinstance(other, CSDRun)
        self.rejected[row] = other.rejected.get(0, Counter())

    def _known(self, verified: Verified) -> torch.Tensor:
        """Which drafted tokens complete a pair that may pass, (B, γ) bool."""
        known, out = set(self.rule.known), torch.zeros_like(verified.tokens, dtype=torch.bool)
        for b, (row, pairs) in enumerate(zip(verified.row_ids.tolist(), self._pairs(verified), strict=True)):
            seen = self.rejected.get(row, Counter())
            for i, pair in enumerate(pairs):
                out[b, i] = pair in known or seen[pair] >= self.rule.seen
        return out

    @staticmethod
    def _pairs(verified: Verified) -> list[list[Pair]]:
        """(y, x) at each place of each row."""
        choices = verified.argmax[:, : verified.draft.gamma].tolist()
        return [list(zip(ys, xs, strict=True)) for ys, xs in zip(choices, verified.tokens.tolist(), strict=True)]


register_rule(
    "csd", CSD, guarantee="lossy", neutral={"ratio": 1.0}, paper="2604.13634",
    summary="Accept a mismatch that came up before, where the target finds the drafted token nearly as likely as its own.",
    example={"ratio": 0.5},
    ladder=("ratio", (0.8, 0.6, 0.4, 0.2)),
)  # fmt: skip
