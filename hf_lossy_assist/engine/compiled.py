"""Rounds of a call as one compiled function each, where the policy decides in tensors alone; any other round runs stage by stage."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..batch.randomness import Randomness
from ..drafters.model import AssistantRun
from ..filters import VerifyAll
from ..models.static import Compilation, StaticRowModel, compiled, failure
from ..round import BEHIND_THE_DRAFT
from ..rules import RuleRun
from ..stats.report import SpeculationStats
from .call import Call
from .commit import MODELS, write_down
from .whole import Numbers, Plan, State, whole_round


SIZES = (8, 16, 24, 32, 48)  # of compiled drafts beside the longest that a stop allows: each is a graph


class WholeRounds:
    """The compiled rounds of one call."""

    def __init__(self, call: Call, target: StaticRowModel, drafter: AssistantRun, draft: StaticRowModel):
        self.call, self.target, self.drafter, self.draft = call, target, drafter, draft
        longest = call.stop.settings.longest
        self.sizes = [*(size for size in SIZES if size < longest), longest]
        self.round = compiled_round(target.model, target.compilation)
        self.ends = torch.tensor(sorted(call.rows.eos), dtype=torch.int64, device=call.rows.ids.device)

    @classmethod
    def of(cls, call: Call, stats: SpeculationStats) -> "WholeRounds | None":
        """None where this call's rounds cannot be one function, or nobody asked for it; `stats` then says why."""
        reason = why_not_whole(call)
        if reason is not None:
            stats.eager_because = stats.eager_because or reason
            return None
        assert isinstance(call.drafter, AssistantRun)
        assert isinstance(call.target, StaticRowModel) and isinstance(call.drafter.model, StaticRowModel)
        return cls(call, call.target, call.drafter, call.drafter.model)

    def fits(self, limits: Sequence[int]) -> bool:
        """Whether the coming round can be compiled: the caches are where rounds leave them, and something is drafted."""
        held = self.call.rows.held()
        ready = self.target.is_ready() and self.draft.is_ready() and self.target.lengths == held and min(held) >= 1
        return max(limits) > 0 and ready and all(n >= h - 1 for n, h in zip(self.draft.lengths, held, strict=True))

    def run(self, limits: Sequence[int], stats: SpeculationStats) -> bool:
        """One round: drafted, verified, accepted in one function, and written down here. False: it could not be compiled."""
        call, rows = self.call, self.call.rows
        held = rows.held()
        gamma = next(size for size in self.sizes if size >= max(limits))
        for model in (self.target, self.draft):
            model.cache.reserve(max(held) + gamma + 1)
        sampling, device = self.drafter.sampling, rows.ids.device
        plan = Plan(gamma, sampling, self.drafter.keeps_probs, call.vocabulary)
        last, _ = rows.after([n - 1 for n in held])
        # Copies: a graph is also of its inputs' strides, and of whether they were made in inference mode.
        state = State(
            last.clone(memory_format=torch.contiguous_format),
            torch.tensor(held, device=device),
            torch.tensor(limits, device=device),
            rows.order.clone(),
            self.ends,
        )
        numbers = draw_numbers(call.randomness, call.rule, plan, rows.order, device)
        inputs = plan, self.target.tensors, self.draft.tensors, call.rule, call.processing.processors, state, numbers
        try:
            with call.clock.time("round"):
                out = self.round(*inputs)
                table = out.tolist()  # the one look at the device
        except RuntimeError as error:
            stats.eager_because = self.target.eager_because = failure(error)
            return False
        call.clock.count("draft", gamma)
        call.clock.count("target", 1)
        first = 4 + len(MODELS)
        rows.write(out[:, first : first + gamma])
        rows.write(out[:, 1:2], out[:, 0])
        accepted = write_down(call, table, stats)
        stats.num_compiled_rounds += 1
        self.target.rollback(rows.held())
        self.draft.rollback(
            [min(h + min(n + 1, gamma), now) for h, n, now in zip(held, accepted, rows.held(), strict=True)]
        )
        return True


def why_not_whole(call: Call) -> str | None:
    """Why the rounds of this call cannot be one compiled function, or None."""
    drafter = call.drafter
    if not isinstance(call.target, StaticRowModel):
        return "the target cannot be rolled back in place"
    if type(drafter) is not AssistantRun or not isinstance(drafter.model, StaticRowModel):
        return "what drafts is no model that can be rolled back in place"
    for model in (call.target, drafter.model):
        if not model.is_ready() and model.eager_because is not None:
            return model.eager_because
    if not call.target.device == drafter.model.device == call.rows.ids.device:
        return "target and draft are on two devices"
    reasons = {
        "the stop looks at each drafted token": call.stop.settings.adaptive,
        "a head reads hidden states": bool(drafter.taps) or call.tap is not None,
        "a filter chooses what is verified": type(call.policy.filter) is not VerifyAll,
        "the rule keeps a state": type(call.rule).observe is not RuleRun.observe,
        "a logits processor reads the text": call.processing.needs_prefix,
        "scores or logits are kept": call.keep_scores or call.keep_logits or call.rows.keeps_scores,
        "rounds are watched": call.watch is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def draw_numbers(
    randomness: Randomness, rule: RuleRun, plan: Plan, order: torch.Tensor, device: torch.device
) -> Numbers:
    """The random numbers of a round, in the order in which rounds that run stage by stage draw them."""
    if not plan.sampling:
        coins = randomness.uniforms(order, plan.gamma, device) if rule.rule.needs_coins else None
        return Numbers(None, None, coins)
    size = plan.vocabulary
    drafting = [randomness.exponentials(order, place, size, device) for place in range(plan.gamma)]
    coins = randomness.uniforms(order, plan.gamma, device)
    return Numbers(drafting, randomness.exponentials(order, BEHIND_THE_DRAFT, size, device), coins)


_rounds: WeakKeyDictionary[Any, dict[Compilation, Callable[..., torch.Tensor]]] = WeakKeyDictionary()


def compiled_round(target: Any, compilation: Compilation) -> Callable[..., torch.Tensor]:
    """`whole_round`, compiled for this target; once for each setting, whatever the number of calls."""
    own = _rounds.setdefault(target, {})
    if compilation not in own:
        own[compilation] = compiled(whole_round, compilation)
    return own[compilation]
