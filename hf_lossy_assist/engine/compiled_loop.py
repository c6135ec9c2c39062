"""Rounds of a call as compiled functions, where the policy decides in tensors alone; any other round runs stage by stage.

A round is one function. With a stop that looks at each drafted token it is one for each `DRAFT_CHUNK` of them, with a look at the device
between, and one for the rest. `why_not_compiled` says which calls are refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..filters import VerifyAll
from ..models.compiled.compilation import FAILURES, compiled_once, failure, graphs_made
from ..models.compiled.static_model import StaticRowModel
from ..round import BONUS_PLACE
from ..stats.speculation import SpeculationStats
from ..stops import StopRun
from ..stops.joint_goodput import JointRun, JointTensors
from . import compiled_round as rounds
from .call import Call
from .commit import COUNTS, apply_round
from .compiled_drafts import compiled_draft, why_not_drafted


DRAFT_LENGTHS = (8, 16, 24, 32, 48)  # of compiled drafts beside the longest that a stop allows: each is a graph
MOST_LAYERS = 96  # of both models in one graph: more take minutes to compile, and gain no more than compiled blocks do
DRAFT_CHUNK = 4  # tokens drafted between two looks at what a stop says
VERIFY_WIDTHS = (4, 8, 16, 48)  # tokens that are verified after such blocks: each is a graph


def why_not_compiled(call: Call) -> str | None:
    """Return why the rounds of this call cannot be compiled functions, or None. What a model itself refuses is its `eager_because`."""
    drafter, stop = call.drafter, call.stop.settings
    if not isinstance(call.target, StaticRowModel):
        return "the target cannot be rolled back in place"
    reason = why_not_drafted(drafter)
    if not call.target.is_ready():
        reason = reason or call.target.eager_because
    if reason is not None:
        return reason
    draft = compiled_draft(drafter)
    if not call.target.device == draft.model.device == call.rows.ids.device:
        return "target and draft are on two devices"
    # Drafting is unrolled; after an adaptive stop the target has a graph of its own.
    verified, longest = len(call.target.cache.layers), min(stop.longest, draft.longest or stop.longest)
    layers = max(draft.layers(DRAFT_CHUNK), verified) if stop.adaptive else draft.layers(longest) + verified
    ours = type(stop).should_stop.__module__.startswith(__package__.partition(".")[0] + ".")
    pure = type(call.stop) is StopRun and ours and stop.features is None and stop.patience == 1
    pure |= type(call.stop) is JointRun
    reasons = {
        f"its rounds would be graphs of {layers} layers, more than {MOST_LAYERS}": layers > MOST_LAYERS,
        "the stop remembers what it has seen, or is the caller's own": stop.adaptive and not pure,
        "a head reads hidden states": bool(drafter.taps) or call.rule_tap is not None,
        "a filter chooses what is verified": type(call.policy.filter) is not VerifyAll,
        "the rule keeps a state": call.rule.keeps_state,
        "a logits processor reads the text": call.processing.needs_prefix,
        "scores or logits are kept": call.keep_scores
        or call.keep_logits
        or call.rows.keeps_scores
        or bool(call.logprobs),
        "rounds are watched": call.on_round is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class CompiledRounds:
    """The compiled rounds of one call."""

    def __init__(self, call: Call, target: StaticRowModel):
        self.call, self.target, self.draft = call, target, compiled_draft(call.drafter)
        longest = self.longest = min(call.stop.settings.longest, self.draft.longest or call.stop.settings.longest)
        self.adaptive = call.stop.settings.adaptive
        self.sizes = [*(size for size in DRAFT_LENGTHS if size < longest), longest]
        if self.adaptive:
            self.sizes = [*VERIFY_WIDTHS, *range(2 * VERIFY_WIDTHS[-1], 2 * longest, VERIFY_WIDTHS[-1])]
        self.device = call.rows.ids.device
        self.ends = torch.tensor(sorted(call.rows.eos), dtype=torch.int64, device=self.device)
        # Where the rows stand, on the device, and what the host knows of it: as long as both agree, nothing is uploaded.
        self._state: rounds.RoundState | None = None
        self._pads = self.ends
        self._known: tuple[list[int], list[int], list[int]] | None = None
        self._joint: JointTensors | None = None  # of the round under way

    @classmethod
    def of(cls, call: Call, stats: SpeculationStats) -> "CompiledRounds | None":
        """Make the compiled rounds of a call, or None where there can be none: `stats` then says why."""
        reason = why_not_compiled(call)
        if reason is not None:
            stats.eager_because = stats.eager_because or reason
            return None
        assert isinstance(call.target, StaticRowModel)
        return cls(call, call.target)

    def fits(self, limits: Sequence[int]) -> bool:
        """Return whether the coming round can be compiled: the caches are where rounds leave them, and something is drafted.

        So are rounds that have room for the target's token alone: there is one at most, and a graph of its own would not be worth it.
        """
        cached = self.call.rows.cached_lengths()
        ready = self.target.is_ready() and self.target.lengths == cached and min(cached) >= 1
        wanted = max(limits) > 0 or not any(self.call.rows.budgets())
        return wanted and ready and self.draft.is_ready(self.call.rows)

    def run(self, limits: Sequence[int], stats: SpeculationStats) -> bool:
        """Run one round to its end; return False where it could not be compiled."""
        call, rows, cached = self.call, self.call.rows, self.call.rows.cached_lengths()
        most = min(self.longest, self._begin_stop() or self.longest)
        limits = [min(limit, most) for limit in limits]
        known, state = graphs_made(), self._where(limits, cached)
        try:
            with call.clock.time("round"):
                gamma, out, self._state, memory = self._decide(limits, cached, state, self.draft.memory(rows))
                table = out.tolist()  # the one look at the device, or the last one
        except FAILURES as error:
            stats.eager_because = self.target.eager_because = failure(error)
            if isinstance(call.stop, JointRun):
                call.stop.forget_round()
            return False
        stats.num_graphs += graphs_made() - known
        stats.num_compiled_rounds += 1
        call.clock.count("draft", gamma)
        call.clock.count("target", 1)
        places = state.cached + self._pads + 1  # after the text of each row
        rows.write_at(out[:, COUNTS : COUNTS + gamma], places)
        rows.write_at(out[:, 1:2], places + out[:, 0])
        accepted = apply_round(call, table, stats)
        if graphs_made() > known:
            call.stop.interrupted()  # whose seconds are not a round's
        self._known = [h + n + 1 for h, n in zip(cached, accepted, strict=True)], list(limits), list(rows.row_id_list)
        now = rows.cached_lengths()
        self.target.rollback(now)
        self.draft.follow(cached, accepted, gamma, now, memory)
        return True

    def _begin_stop(self) -> int:
        """Have a joint stop begin a round; return the most tokens that it lets a row draft, 0 being any number."""
        stop, most = self.call.stop, 0
        if isinstance(stop, JointRun):
            self._joint, most = stop.traced(self.call.rows.row_id_list, self.device, DRAFT_CHUNK)
        return most

    def compile_all(self, length: int) -> None:
        """Run each function that rounds of texts up to `length` tokens may come to, on storage of every size that they may have."""
        rows, longest = self.call.rows, self.longest
        short = [1] * len(rows.row_id_list)  # as if the text had just begun: no draft outgrows the storage
        self.target.allocate(1)  # prompts of one token have not been fed yet
        self.draft.allocate()
        memory = self.draft.blank(len(short))
        self._begin_stop()
        for slots in self.target.cache.sizes_up_to(length + longest + 1):
            with self.target.cache.other(slots), self.draft.cache.other(slots):
                for size in self.sizes[: 1 + sum(size < longest for size in self.sizes)]:
                    limits = [min(size, longest)] * len(short)
                    state = self._where(limits, [max(n, 1) for n in rows.cached_lengths()])
                    last = state.last.new_zeros(len(short), 2)
                    state = state._replace(last=last, cached=torch.ones_like(self._pads))
                    self._decide(limits, short, state, memory, size)
        self._state = self._known = None
        if isinstance(self.call.stop, JointRun):
            self.call.stop.forget_round()

    def _decide(
        self,
        limits: Sequence[int],
        cached: list[int],
        state: rounds.RoundState,
        memory: torch.Tensor | None,
        only: int | None = None,
    ) -> tuple[int, torch.Tensor, rounds.RoundState, torch.Tensor | None]:
        """Draft, verify and accept: how many tokens were drafted, what `apply_round` writes down, the state and the memory after it.

        `only`: after an adaptive stop, draft one block, and verify as many tokens.
        """
        run = self.call.stop
        looks = self.adaptive and self._joint is None
        stop = (run.alone if isinstance(run, JointRun) else run.settings) if looks else None
        rules = rounds.RoundRules(self.call.rule, stop, self.call.processing.processors, self._joint)
        if not self.adaptive:
            gamma = next(size for size in self.sizes if size >= max(limits))
            plan, models = self._plan(gamma, cached, gamma), (self.target.tensors, self.draft.traced)
            races = self._races(plan, 0)
            found = self._compiled(rounds.run_round)(plan, *models, rules, state, memory, races, self._numbers(plan))
        else:
            gamma, blocks, progress, more = (
                0,
                list[rounds.DraftedBlock](),
                rounds.DraftProgress.first(state, memory),
                True,
            )
            draft = self._compiled(rounds.draft_block)
            while more:
                plan = self._plan(DRAFT_CHUNK, cached, gamma + DRAFT_CHUNK)
                races = self._races(plan, gamma)
                block, progress, goes_on = draft(plan, self.draft.traced, rules, state, progress, races)
                blocks.append(block)
                gamma += DRAFT_CHUNK
                last = only is not None or gamma >= max(limits)
                goes = not (last and self._joint is None) and bool(goes_on)  # a look at the device
                more = goes and not last
                if isinstance(run, JointRun) and block.bins is not None:
                    run.drafted(block.bins)
            size = only or next(size for size in self.sizes if size >= gamma)
            plan, drafted = self._plan(size, cached, size), rounds.DraftedBlock.join(blocks, size)
            finish, numbers = self._compiled(rounds.finish_round), self._numbers(plan)
            learns = None if memory is None else self.draft.traced
            found = finish(plan, self.target.tensors, learns, rules, state, drafted, progress.lengths, numbers)
        out, last, now, memory = found
        return gamma, out, state._replace(last=last, cached=now), memory

    def _compiled(self, function: Callable[..., object]) -> Callable[..., Any]:
        models = [(self.target.model, self.target.signature), (self.draft.network, self.draft.signature)]
        return compiled_once(function, self.target.compilation, models)

    def _plan(self, gamma: int, cached: list[int], drafted: int) -> rounds.RoundPlan:
        """Plan a block of `gamma` tokens, and have room for `drafted` in the caches."""
        for model in (self.target, self.draft):
            model.cache.reserve(max(cached) + drafted + 1 + self.draft.spare)
        run = self.draft.run
        return rounds.RoundPlan(gamma, run.sampling, run.reads_probs, self.call.vocabulary, self.draft.partial)

    def _where(self, limits: Sequence[int], cached: list[int]) -> rounds.RoundState:
        """Return where the rows stand: as the last round left it on the device, unless a row has ended or left, or drafts another number."""
        rows = self.call.rows
        if self._state is not None and self._known == (cached, list(limits), rows.row_id_list):
            return self._state
        self._pads, held, most = (torch.tensor(x, device=self.device) for x in (rows.pads, cached, limits))
        last, _ = rows.uncached_tokens([n - 1 for n in cached])
        # Copies: a graph is also of its inputs' strides, and of whether they were made in inference mode.
        last = last.clone(memory_format=torch.contiguous_format)
        return rounds.RoundState(last, held, most, rows.row_ids.clone(), self.ends)

    def _races(self, plan: rounds.RoundPlan, first: int) -> list[torch.Tensor] | None:
        """Draw the random numbers of the drafted tokens from place `first` on, in the order in which single steps draw them."""
        if not plan.sampling:
            return None
        return [self._exponentials(plan, place) for place in range(first, first + plan.gamma)]

    def _numbers(self, plan: rounds.RoundPlan) -> rounds.RoundNumbers:
        """Draw the random numbers that decide about the draft."""
        if not plan.sampling and not self.call.rule.rule.needs_coins:
            return rounds.RoundNumbers(None, None)
        coins = self.call.randomness.uniforms(self.call.rows.row_ids, plan.gamma, self.device)
        return rounds.RoundNumbers(self._exponentials(plan, BONUS_PLACE) if plan.sampling else None, coins)

    def _exponentials(self, plan: rounds.RoundPlan, place: int) -> torch.Tensor:
        return self.call.randomness.exponentials(self.call.rows.row_ids, place, plan.vocabulary, self.device)
