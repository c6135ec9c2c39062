"""A choice in every round of what drafts, by costs and accepted tokens: nothing, a look into the text, or a model.

A plain round takes T₀ seconds and writes one token in each row. A round with drafts takes c·T₀ and writes 1 + g, where
g is expected from what was accepted before. ρ is the number of tokens that a row now gains in T₀. The extra seconds of
drafts would write ρ·(c − 1) tokens elsewhere, so that they are worth g − ρ·(c − 1) tokens; the most are drafted, if
above 0.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import ClassVar
from weakref import WeakKeyDictionary

from ..batch.logits_processing import Processing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..registry import register_drafter
from ..round import Draft, Verified
from ..stats.clock import Clock
from ..stops import StopRun
from ..stops.fallback import DraftSwitch, Remembered, SwitchRule
from ..validation import check_number, check_positive
from .base import DraftContext, Drafter, DrafterRun, certain_draft
from .composite import CompositeDrafter, CompositeRun, as_part, of_then
from .model import AssistantDrafter
from .suffix import LONGEST_MATCH, SuffixDrafter, SuffixRun


KEEP = 1 - 1 / 32  # decay of a match length's counts at each use: after a copied stretch they hold many tokens
LEAST = 0.1  # least estimate that a token of the text is accepted, with all before it, at which it is drafted
LATELY = 1 - 1 / 16  # decay of tokens and seconds at each round
RECENT = 8  # rounds whose seconds count
# Rounds: of a trial, without the model before its seconds no longer count, of its averages, and before its first trial.
TRIES, NEAR, WINDOW, WAIT = 4, 8, 32, 32


@dataclass(frozen=True)
class NoDrafter(Drafter):
    """Draft nothing: the model's part of `AutoDrafter` in a call without one."""

    gives_probs: ClassVar[bool] = True
    takes_assistant: ClassVar[bool] = True

    def start(self, context: DraftContext) -> "NoRun":
        return NoRun(context.sampling)


class NoRun(DrafterRun):
    """A call without drafts."""

    gives_probs = skip_validation = True

    def __init__(self, sampling: bool):
        self.sampling = sampling

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        return certain_draft([[]] * len(limits), rows, limits, self.sampling)

    def fresh(self, rows: int, limit: int, stop: StopRun, processing: Processing, clock: Clock) -> "NoRun":
        return self


@dataclass(frozen=True)
class AutoDrafter(Drafter):
    """Choose in each round what writes the most tokens a second: no draft, `first`, or `then` with `first` where
    better.

    `first` searches the text. How many of its tokens the target accepts is estimated for each length of a match, also
    in rounds in which it does not draft. `then`, by default the call's draft model or the drafter passed as
    `assistant_model`, is switched off and on by the rule of `Fallback`. Later calls of the same kind with the same
    models continue with the estimates.

    The choice depends on past rounds only, so the output distribution is the target's. It depends on measured seconds,
    too, so that a seed does not repeat a sampled text.

    Args:
        margin, trials: as in `Fallback`.
    """

    first: SuffixDrafter = field(default_factory=SuffixDrafter)
    then: Drafter = field(default_factory=NoDrafter)
    margin: float = 0.05
    trials: float = 0.02
    needs_assistant = of_then("needs_assistant")
    gives_probs = of_then("gives_probs")
    takes_assistant = of_then("takes_assistant")

    def __post_init__(self) -> None:
        check_number("AutoDrafter.margin", self.margin, 0.0, 1.0)
        check_positive("AutoDrafter.trials", self.trials, 1.0)
        for name in ("first", "then"):
            object.__setattr__(self, name, as_part(f"AutoDrafter.{name}", getattr(self, name)))
        if not isinstance(self.first, SuffixDrafter) or isinstance(self.then, SuffixDrafter):
            raise ValueError("AutoDrafter: expected a SuffixDrafter as first, and then with a model")

    @property
    def main(self) -> Drafter:
        return self.then

    def over(self, other: Drafter) -> Drafter | None:
        return replace(self, then=other) if isinstance(self.then, NoDrafter) else None

    def without_choice(self, assistant: bool) -> Drafter:
        """Return a drafter with the same parts that does not look at seconds. `assistant`: there is a draft model."""
        if isinstance(self.then, NoDrafter):
            return CompositeDrafter(self.first) if assistant else self.first
        return CompositeDrafter(self.first, self.then)

    def start(self, context: DraftContext) -> "AutoRun":
        model = isinstance(self.then, NoDrafter) and context.assistant_run is not None
        then = (AssistantDrafter() if model else self.then).start(context)
        models = ESTIMATES.setdefault(context.target, WeakKeyDictionary())
        kinds = models.setdefault(getattr(then, "network", context.target), {})
        estimates = kinds.setdefault((context.cost_key, self.margin, self.trials), Estimates())
        rule = SwitchRule(self.margin, 3, WINDOW, WAIT, self.trials, TRIES, NEAR, remembers=True)
        switch = DraftSwitch(rule, len(context.rows.row_id_list))
        return AutoRun(self.first.start(context), then, context, switch, estimates)


class Estimates:
    """Estimates of calls of one kind: acceptance after matches, and seconds of rounds with drafts from the text."""

    def __init__(self) -> None:
        self.accepted = [0.0] * (LONGEST_MATCH + 1)  # by length of the match
        self.rejected = list(self.accepted)
        self.seconds: dict[tuple[int, int], deque[float]] = {}  # by ⌊log₂⌋ + 1 of rows and of the longest draft
        self.switches: dict[int, Remembered] = {}
        # Decayed sums over the rounds: tokens per row, and seconds in T₀.
        self.tokens = self.spent = 1.0

    @property
    def rate(self) -> float:
        """ρ, at least 1."""
        return max(self.tokens / self.spent, 1.0)

    def add_round(self, tokens: float, spent: float) -> None:
        """Add a round of any kind."""
        self.tokens, self.spent = LATELY * self.tokens + tokens, LATELY * self.spent + spent

    def learn(self, size: int, accepted: int, rejected: bool) -> None:
        """Add a draft after a match of `size` tokens: how many tokens were right, and whether one was wrong."""
        self.accepted[size] = KEEP * self.accepted[size] + accepted
        self.rejected[size] = KEEP * self.rejected[size] + rejected

    def chance(self, size: int) -> float:
        """Estimate the probability that a token is accepted after those before it; all lengths count as two tokens."""
        right, wrong = sum(self.accepted), sum(self.rejected)
        prior = (right + 1) / (right + wrong + 2)
        return (self.accepted[size] + 2 * prior) / (self.accepted[size] + self.rejected[size] + 2)

    def longest(self, size: int) -> int:
        """Return how many tokens are worth drafting after a match of `size` tokens."""
        return max(1, int(math.log(LEAST) / math.log(self.chance(size))))

    def gain(self, size: int, count: int) -> float:
        """Return g of a draft of `count` tokens: the sum of the chances that each is accepted."""
        c = self.chance(size)
        return c * (1 - c**count) / (1 - c)

    def cost(self, rows: int, longest: int, plain: float) -> float:
        """Return c, for `plain` = T₀: that of shorter drafts if none were as long, 1 if none were measured."""
        for bits in range(longest.bit_length(), 0, -1):
            seconds = self.seconds.get((rows.bit_length(), bits))
            if seconds:
                return median(seconds) / plain
        return 1.0

    def add_seconds(self, rows: int, longest: int, seconds: float) -> None:
        """Add a measured round."""
        key = rows.bit_length(), longest.bit_length()
        self.seconds.setdefault(key, deque(maxlen=RECENT)).append(seconds)


class AutoRun(CompositeRun):
    """The choice during one call. `chosen`: what drafted in the last round, "none", "text" or "model"."""

    first: SuffixRun

    def __init__(
        self, first: SuffixRun, then: DrafterRun, context: DraftContext, switch: DraftSwitch, estimates: Estimates
    ):
        super().__init__(first, then, context)
        self.sampling, self.switch, self.estimates = context.sampling, switch, estimates
        self.begins_alone = switch.recall_from(estimates.switches)
        self.chosen, self._longest = "none", 0
        # By row: length of the match, the tokens that followed it, length of the text.
        self._matches: list[tuple[int, list[int], int]] = []
        self._active: list[int] = []  # unfinished rows
        self._drafted: list[int] = []  # those that the model drafts for

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        active = self._active = [b for b, is_finished in enumerate(rows.finished) if not is_finished]
        may = self.switch.begin(len(active)) and not isinstance(self.then, NoRun)
        matches, estimates = self.first.find(rows, limits), self.estimates
        lengths = [len(self.first.texts[row].tokens) for row in rows.row_id_list]
        self._matches = [(*match, length) for match, length in zip(matches, lengths, strict=True)]
        texts = [tokens[: estimates.longest(size)] if tokens else [] for size, tokens in matches]
        gains = [estimates.gain(size, len(tokens)) for (size, _), tokens in zip(matches, texts, strict=True)]
        self.chosen, least = self._choose(may, [gains[b] for b in active], max(map(len, texts)))
        texts = [tokens if gain > least else [] for tokens, gain in zip(texts, gains, strict=True)]
        more = [0 if tokens or self.chosen != "model" else n for n, tokens in zip(limits, texts, strict=True)]
        self._drafted, self._longest = [b for b in active if more[b]], max(map(len, texts))
        if self.chosen == "model" and not self._drafted:
            self.chosen = "text" if self._longest else "none"
        return self._add(certain_draft(texts, rows, limits, self.sampling), rows, more, randomness)

    def _choose(self, may: bool, gains: Sequence[float], longest: int) -> tuple[str, float]:
        """Return what drafts in this round, and the gain above which a row drafts from the text.

        `may`: the model may draft. `gains`: g of the unfinished rows from the text, of `longest` tokens at most.
        """
        switch, measured = self.switch, self.switch.measured
        usual = "model" if may else "none"
        if switch.tries or not measured.plain_seconds or not gains:
            return usual, math.inf
        rate, plain, least = self.estimates.rate, median(measured.plain_seconds), math.inf
        text = -math.inf
        if longest:
            gain, cost = fmean(gains), self.estimates.cost(switch.rows, longest, plain)
            # Since a match mostly goes on, ρ may become that of this round, (1 + g) / c.
            text = max(gain - rate * (cost - 1), (1 + gain) / cost - 1)
        worth = 0.0
        if may and measured.cost is not None and measured.tokens:
            least = fmean(measured.tokens) - 1
            worth = max(fmean(max(gain, least) for gain in gains) - rate * (measured.cost - 1), 0.0)
        return ("text", 0.0) if text > worth else (usual, least)

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        for b, (size, tokens, length) in enumerate(self._matches):
            pairs = list(zip(tokens, rows.text_on_host(b)[length:], strict=False))
            right = next((i for i, (token, written) in enumerate(pairs) if token != written), len(pairs))
            if pairs:
                self.estimates.learn(size, right, right < len(pairs))
        super().learn(rows, verified, accepted)
        switch, plain = self.switch, self.switch.measured.plain_seconds
        if plain and not switch.first_round:
            self.estimates.add_round(fmean(accepted[b] for b in self._active) + 1, switch.elapsed / median(plain))
            switch.rate = self.estimates.rate
        if self.chosen == "model" and verified.draft.gamma:
            switch.drafted(fmean(accepted[b] for b in self._drafted) + 1)
            return
        seconds = switch.passed(plain=not verified.draft.gamma)
        if seconds is not None and self._longest:
            self.estimates.add_seconds(switch.rows, self._longest, seconds)

    def fresh(self, rows: int, limit: int, stop: StopRun, processing: Processing, clock: Clock) -> "AutoRun":
        out = super().fresh(rows, limit, stop, processing, clock)
        assert isinstance(out, AutoRun)
        out.switch = DraftSwitch(self.switch.rule, max(rows, 1))
        out.begins_alone = out.switch.recall_from(self.estimates.switches)
        return out


# By target, network that drafts (the target: none), and kind of call.
ESTIMATES: "WeakKeyDictionary[object, WeakKeyDictionary[object, dict[Hashable, Estimates]]]" = WeakKeyDictionary()

register_drafter(
    "auto",
    AutoDrafter,
    summary="Chooses in every round among no draft, a look into the text, and a model, by measured cost.",
)
