"""Compiled rounds, for policies that decide in tensors alone; all other rounds run stage by stage.

A round is one compiled function. With a stop that reads each drafted token, it is one function per `DRAFT_CHUNK`
drafted tokens, each followed by a device sync, and one for the rest. `why_not_compiled` lists the calls that cannot be
compiled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..drafters.networks.base import Memory
from ..filters import VerifyAll
from ..models.compiled.compilation import FAILURES, compiled_once, failure, graphs_made
from ..models.compiled.static_model import StaticRowModel
from ..round import BONUS_PLACE
from ..stats.speculation import SpeculationStats
from ..stops import StopRun
from ..stops.joint_goodput import JointRun, JointTensors
from . import compiled_round as rounds
from .call import Call
from .stages import COUNTS, apply_round


DRAFT_LENGTHS = (8, 16, 24, 32, 48)  # compiled draft lengths below the stop's longest: one graph each
MOST_LAYERS = 96  # of both models in one graph: more take minutes to compile and are no faster than compiled blocks
DRAFT_CHUNK = 4  # tokens drafted between two device syncs of an adaptive stop
VERIFY_WIDTHS = (4, 8, 16, 48)  # verify widths after such chunks: one graph each


def why_not_compiled(call: Call) -> str | None:
    """Return why the rounds of this call cannot be compiled, or None.
    A model that refuses by itself gives its `eager_because`."""
    drafter, stop = call.drafter, call.stop.settings
    if not isinstance(call.target, StaticRowModel):
        return "the target cannot be rolled back in place"
    reason = rounds.why_not_drafted(drafter)
    if not call.target.is_ready():
        reason = reason or call.target.eager_because
    if reason is not None:
        return reason
    draft = rounds.compiled_draft(drafter)
    if not call.target.device == draft.model.device == call.rows.ids.device:
        return "target and draft are on two devices"
    # The draft steps are unrolled; with an adaptive stop the target has a separate graph.
    verified, longest = len(call.target.cache.layers), min(stop.longest, draft.longest or stop.longest)
    steps = draft.extra_steps + (DRAFT_CHUNK if stop.adaptive else longest) if draft.longest is None else 1
    drafted = steps * len(draft.cache.layers)
    layers = max(drafted, verified) if stop.adaptive else drafted + verified
    ours = type(stop).should_stop.__module__.startswith(__package__.partition(".")[0] + ".")
    pure = type(call.stop) is StopRun and ours and stop.features is None and stop.patience == 1
    pure |= type(call.stop) is JointRun
    reasons = {
        f"its rounds would be graphs of {layers} layers, more than {MOST_LAYERS}": layers > MOST_LAYERS,
        "the stop remembers what it has seen, or is the caller's own": stop.adaptive and not pure,
        "a head reads hidden states": bool(drafter.taps) or call.rule_tap is not None,
        "a filter chooses what is verified": type(call.policy.filter) is not VerifyAll,
        "the rule keeps a state": call.rule.keeps_state,
        "a logits processor reads the text": call.processing.needs_prefix or call.processing.runs_callers_code,
        "scores or logits are kept": any((call.keep_scores, call.keep_logits, call.rows.keeps_scores, call.logprobs)),
        "rounds are watched": call.on_round is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class CompiledRounds:
    """The compiled rounds of one call."""

    def __init__(self, call: Call, target: StaticRowModel):
        self.call, self.target, self.draft = call, target, rounds.compiled_draft(call.drafter)
        longest = self.longest = min(call.stop.settings.longest, self.draft.longest or call.stop.settings.longest)
        self.adaptive = call.stop.settings.adaptive
        self.sizes = [*(size for size in DRAFT_LENGTHS if size < longest), longest]
        if self.adaptive:
            self.sizes = [*VERIFY_WIDTHS, *range(2 * VERIFY_WIDTHS[-1], 2 * longest, VERIFY_WIDTHS[-1])]
        self.device = call.rows.ids.device
        self.ends = torch.tensor(sorted(call.rows.eos), dtype=torch.int64, device=self.device)
        # The rows' state on the device and the host's copy of it: while both agree, nothing is uploaded.
        self._state: rounds.RoundState | None = None
        self._pads = self.ends
        self._known: tuple[list[int], list[int], list[int]] | None = None
        self._joint: JointTensors | None = None  # of the current round

    @classmethod
    def of(cls, call: Call, stats: SpeculationStats) -> "CompiledRounds | None":
        """Return the compiled rounds of a call, or None if it cannot be compiled;
        `stats.eager_because` then gives the reason."""
        reason = why_not_compiled(call)
        if reason is not None:
            stats.eager_because = stats.eager_because or reason
            return None
        assert isinstance(call.target, StaticRowModel)
        return cls(call, call.target)

    def fits(self, limits: Sequence[int]) -> bool:
        """Return whether the next round can be compiled: the caches are in the state that rounds leave, and a row
        drafts.

        A round with room for the target's token alone is compiled too: there is at most one, not worth a separate
        graph.
        """
        cached = self.call.rows.cached_lengths()
        ready = self.target.is_ready() and self.target.lengths == cached and min(cached) >= 1
        wanted = max(limits) > 0 or not any(self.call.rows.budgets())
        return wanted and ready and self.draft.is_ready(self.call.rows)

    def run(self, limits: Sequence[int], stats: SpeculationStats) -> bool:
        """Run one round; return False if it could not be compiled."""
        call, rows, cached = self.call, self.call.rows, self.call.rows.cached_lengths()
        most = min(self.longest, self._begin_stop() or self.longest)
        limits = [min(limit, most) for limit in limits]
        graphs_before, state = graphs_made(), self._where(limits, cached)
        try:
            with call.clock.time("round"):
                gamma, out, self._state, memory = self._decide(limits, cached, state, self.draft.memory(rows))
                table = out.tolist()  # the only device sync, or the last one
        except FAILURES as error:
            stats.eager_because = self.target.eager_because = failure(error)
            if isinstance(call.stop, JointRun):
                call.stop.forget_round()
            return False
        stats.num_graphs += graphs_made() - graphs_before
        stats.num_compiled_rounds += 1
        call.clock.forwards["draft"] += gamma
        call.clock.forwards["target"] += 1
        next_positions = state.cached + self._pads + 1  # position after each row's text
        rows.write_at(out[:, COUNTS : COUNTS + gamma], next_positions)
        rows.write_at(out[:, 1:2], next_positions + out[:, 0])
        accepted = apply_round(call, table, stats)
        if graphs_made() > graphs_before:
            call.stop.interrupted()  # this round's seconds include a compilation
        self._known = [h + n + 1 for h, n in zip(cached, accepted, strict=True)], list(limits), list(rows.row_id_list)
        now = rows.cached_lengths()
        self.target.rollback(now)
        self.draft.follow(cached, accepted, gamma, now, memory)
        return True

    def _begin_stop(self) -> int:
        """Begin the round of a joint stop; return the draft limit that it sets for all rows, 0 for none."""
        stop, most = self.call.stop, 0
        if isinstance(stop, JointRun):
            self._joint, most = stop.traced(self.call.rows.row_id_list, self.device, DRAFT_CHUNK)
        return most

    def compile_all(self, length: int) -> None:
        """Compile every function that rounds may need for texts of up to `length` tokens, at the caches' capacity for
        the longest, which the models' later calls have from the beginning.

        The rows' keys and values are overwritten.
        """
        rows, longest = self.call.rows, self.longest
        ones = [1] * len(rows.row_id_list)  # the rows' lengths: no draft outgrows the caches
        self.target.allocate(1)  # prompts of one token have not allocated it yet
        memory = self.draft.begin()
        self._begin_stop()
        for model in (self.target, self.draft):
            model.cache.warm(length + longest)
        for size in self.sizes[: 1 + sum(size < longest for size in self.sizes)]:
            limits = [min(size, longest)] * len(ones)
            state = self._where(limits, [max(n, 1) for n in rows.cached_lengths()])
            last = state.last.new_zeros(len(ones), 2)
            self._decide(limits, ones, state._replace(last=last, cached=torch.ones_like(self._pads)), memory, size)
        self._state = self._known = None
        if isinstance(self.call.stop, JointRun):
            self.call.stop.forget_round()

    def _decide(
        self,
        limits: Sequence[int],
        cached: list[int],
        state: rounds.RoundState,
        memory: Memory,
        width: int | None = None,
    ) -> tuple[int, torch.Tensor, rounds.RoundState, Memory]:
        """Draft, verify and accept; return the number of drafted tokens, the table for `apply_round`, the next state
        and memory.

        `width`: with an adaptive stop, draft one chunk and verify at this width.
        """
        run = self.call.stop
        stop = None
        if self.adaptive and self._joint is None:
            stop = run.alone if isinstance(run, JointRun) else run.settings
        rules = rounds.RoundRules(self.call.rule, stop, self.call.processing.processors, self._joint)
        if self.adaptive:
            blocks, lengths = self._draft_chunks(rules, limits, cached, state, memory, 1 if width else None)
            gamma = DRAFT_CHUNK * len(blocks)
            width = width or next(size for size in self.sizes if size >= gamma)
            plan, drafted = self._plan(width, cached, width), rounds.DraftedBlock.join(blocks, width)
            learns = self.draft.traced if memory else None
            finish, numbers = self._compiled(rounds.finish_round), self._numbers(plan)
            outcome = finish(plan, self.target.tensors, learns, rules, state, drafted, lengths, numbers)
        else:
            gamma = next(size for size in self.sizes if size >= max(limits))
            plan, models = self._plan(gamma, cached, gamma), (self.target.tensors, self.draft.traced)
            races = self._races(plan, 0)
            outcome = self._compiled(rounds.run_round)(plan, *models, rules, state, memory, races, self._numbers(plan))
        table, last, now, memory = outcome
        return gamma, table, state._replace(last=last, cached=now), memory

    def _draft_chunks(
        self,
        rules: rounds.RoundRules,
        limits: Sequence[int],
        cached: list[int],
        state: rounds.RoundState,
        memory: Memory,
        most: int | None,
    ) -> tuple[list[rounds.DraftedBlock], torch.Tensor]:
        """Draft chunk by chunk until no row goes on, up to `most` chunks;
        return them and each row's number of valid tokens."""
        run, draft = self.call.stop, self._compiled(rounds.draft_block)
        most = most or max(-(-max(limits) // DRAFT_CHUNK), 1)
        blocks, progress = list[rounds.DraftedBlock](), rounds.DraftProgress.first(state, memory)
        any_row_continues = True
        while any_row_continues and len(blocks) < most:
            gamma = DRAFT_CHUNK * len(blocks)
            plan = self._plan(DRAFT_CHUNK, cached, gamma + DRAFT_CHUNK)
            races = self._races(plan, gamma)
            block, progress, continues = draft(plan, self.draft.traced, rules, state, progress, races)
            blocks.append(block)
            is_last_chunk = len(blocks) == most
            if not is_last_chunk or self._joint is not None:
                any_row_continues = bool(continues)  # device sync
            if isinstance(run, JointRun) and block.bins is not None:
                run.drafted(block.bins)
        return blocks, progress.lengths

    def _compiled(self, function: Callable[..., object]) -> Callable[..., Any]:
        models = [(self.target.model, self.target.signature), (self.draft.network, self.draft.signature)]
        return compiled_once(function, self.target.compilation, models)

    def _plan(self, gamma: int, cached: list[int], drafted: int) -> rounds.RoundPlan:
        """Plan a block of `gamma` tokens, with room for `drafted` tokens in the caches."""
        for model in (self.target, self.draft):
            model.cache.reserve(max(cached) + drafted + 1 + self.draft.spare)
        run = self.draft.run
        return rounds.RoundPlan(gamma, run.sampling, run.reads_probs, self.call.vocabulary, self.draft.partial)

    def _where(self, limits: Sequence[int], cached: list[int]) -> rounds.RoundState:
        """Return the rows' state: the last round's, on the device, unless a row has ended or left or its limit has
        changed."""
        rows = self.call.rows
        if self._state is not None and self._known == (cached, list(limits), rows.row_id_list):
            return self._state
        self._pads, cached_lengths, most = (torch.tensor(x, device=self.device) for x in (rows.pads, cached, limits))
        last, _ = rows.uncached_tokens([n - 1 for n in cached])
        # Copies: graphs are guarded on the strides of their inputs, and on whether they are inference tensors.
        last = last.clone(memory_format=torch.contiguous_format)
        return rounds.RoundState(last, cached_lengths, most, rows.row_ids.clone(), self.ends)

    def _races(self, plan: rounds.RoundPlan, first: int) -> list[torch.Tensor] | None:
        """Draw the random numbers for the drafted tokens from place `first` on, in the order of eager drafting."""
        if not plan.sampling:
            return None
        return [self._exponentials(plan, slot) for slot in range(first, first + plan.gamma)]

    def _numbers(self, plan: rounds.RoundPlan) -> rounds.RoundNumbers:
        """Draw the random numbers for verification."""
        if not plan.sampling and not self.call.rule.rule.needs_coins:
            return rounds.RoundNumbers(None, None)
        coins = self.call.randomness.uniforms(self.call.rows.row_ids, plan.gamma, self.device)
        return rounds.RoundNumbers(self._exponentials(plan, BONUS_PLACE) if plan.sampling else None, coins)

    def _exponentials(self, plan: rounds.RoundPlan, slot: int) -> torch.Tensor:
        return self.call.randomness.exponentials(self.call.rows.row_ids, slot, plan.vocabulary, self.device)
