"""Rounds of a call as compiled functions, where the policy decides in tensors alone; any other round runs stage by stage.

A round is one function; with a stop that looks at each drafted token it is one for each `DRAFT_CHUNK` of them, with a look at the device between,
and one for the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..drafters.model import AssistantRun
from ..filters import VerifyAll
from ..models.compiled.compilation import FAILURES, compiled_once, failure, graphs_made
from ..models.compiled.static_model import Block, StaticRowModel
from ..round import BONUS_PLACE
from ..stats.speculation import SpeculationStats
from ..stops import StopRun
from .call import Call
from .commit import COUNTS, apply_round
from .compiled_round import (
    DraftedBlock,
    RoundNumbers,
    RoundPlan,
    RoundState,
    draft_block,
    finish_round,
    first_progress,
    run_round,
)


DRAFT_LENGTHS = (8, 16, 24, 32, 48)  # of compiled drafts beside the longest that a stop allows: each is a graph
MOST_LAYERS = 96  # of both models in one graph: more take minutes to compile, and gain no more than compiled blocks do
DRAFT_CHUNK = 4  # tokens drafted between two looks at what a stop says
VERIFY_WIDTHS = (4, 8, 16, 48)  # tokens that are verified behind such blocks: each is a graph


class CompiledRounds:
    """The compiled rounds of one call."""

    def __init__(self, call: Call, target: StaticRowModel, drafter: AssistantRun, draft: StaticRowModel):
        self.call, self.target, self.drafter, self.draft = call, target, drafter, draft
        settings = call.stop.settings
        self.adaptive = settings.adaptive
        self.sizes = [*(size for size in DRAFT_LENGTHS if size < settings.longest), settings.longest]
        if self.adaptive:
            self.sizes = [*VERIFY_WIDTHS, *range(2 * VERIFY_WIDTHS[-1], 2 * settings.longest, VERIFY_WIDTHS[-1])]
        self.device = call.rows.ids.device
        self.ends = torch.tensor(sorted(call.rows.eos), dtype=torch.int64, device=self.device)
        # Where the rows stand, on the device, and what the host knows of it: as long as both agree, nothing is uploaded.
        self._state: RoundState | None = None
        self._pads = self.ends
        self._known: tuple[list[int], list[int], list[int]] | None = None

    @classmethod
    def of(cls, call: Call, stats: SpeculationStats) -> "CompiledRounds | None":
        """None where this call's rounds cannot be one function, or nobody asked for it; `stats` then says why."""
        reason = why_not_compiled(call)
        if reason is not None:
            stats.eager_because = stats.eager_because or reason
            return None
        assert isinstance(call.drafter, AssistantRun)
        assert isinstance(call.target, StaticRowModel) and isinstance(call.drafter.model, StaticRowModel)
        return cls(call, call.target, call.drafter, call.drafter.model)

    def fits(self, limits: Sequence[int]) -> bool:
        """Whether the coming round can be compiled: the caches are where rounds leave them, and something is drafted.

        So are rounds that have room for the target's token alone: there is one at most, and a graph of its own would not be worth it.
        """
        held = self.call.rows.cached_lengths()
        ready = self.target.is_ready() and self.draft.is_ready() and self.target.lengths == held and min(held) >= 1
        wanted = max(limits) > 0 or not any(self.call.rows.budgets())
        return wanted and ready and all(n >= h - 1 for n, h in zip(self.draft.lengths, held, strict=True))

    def run(self, limits: Sequence[int], stats: SpeculationStats) -> bool:
        """One round: drafted, verified, accepted in compiled functions, and written down here. False: they could not be compiled."""
        call, rows, held = self.call, self.call.rows, self.call.rows.cached_lengths()
        known = graphs_made()
        state = self._where(limits, held)
        try:
            with call.clock.time("round"):
                gamma, out, self._state = (self._in_blocks if self.adaptive else self._at_once)(limits, held, state)
                table = out.tolist()  # the one look at the device, or the last one
        except FAILURES as error:
            stats.eager_because = self.target.eager_because = failure(error)
            return False
        stats.num_graphs += graphs_made() - known
        stats.num_compiled_rounds += 1
        call.clock.count("draft", gamma)
        call.clock.count("target", 1)
        places = state.held + self._pads + 1  # of the text behind each row
        rows.write_at(out[:, COUNTS : COUNTS + gamma], places)
        rows.write_at(out[:, 1:2], places + out[:, 0])
        accepted = apply_round(call, table, stats)
        self._known = [h + n + 1 for h, n in zip(held, accepted, strict=True)], list(limits), list(rows.row_id_list)
        self.target.rollback(rows.cached_lengths())
        self.draft.rollback(
            [min(h + min(n + 1, gamma), now) for h, n, now in zip(held, accepted, rows.cached_lengths(), strict=True)]
        )
        return True

    def compile_all(self, length: int) -> None:
        """Run each function that rounds of texts up to `length` tokens may come to, on storage of every size that they may have."""
        end = length + self.call.stop.settings.longest + 1
        for model in (self.target, self.draft):
            model.allocate(1)  # prompts of one token have not been fed yet
        for slots in self.target.cache.sizes_up_to(end):
            with self.target.cache.other(slots), self.draft.cache.other(slots):
                self._compile_all()
        self._state = self._known = None

    def _compile_all(self) -> None:
        rows, longest = self.call.rows, self.call.stop.settings.longest
        short = [1] * len(rows.row_id_list)  # as if the text had just begun: no draft outgrows the storage
        for size in self.sizes:
            limits = [min(size, longest)] * len(short)
            state = self._where(limits, [max(n, 1) for n in rows.cached_lengths()])
            state = state._replace(last=state.last.new_zeros(len(short), 2), held=torch.ones_like(self._pads))
            if self.adaptive:
                self._in_blocks(limits, short, state, only=size)
            else:
                self._at_once(limits, short, state)
            if size >= longest:
                return

    def _at_once(
        self, limits: Sequence[int], held: list[int], state: RoundState
    ) -> tuple[int, torch.Tensor, RoundState]:
        """A round of one function: how many tokens were drafted, what `commit` writes down, and the state behind it."""
        gamma = next(size for size in self.sizes if size >= max(limits))
        self._reserve(max(held) + gamma + 1)
        plan = self._plan(gamma)
        races = self._races(plan, 0)
        out, last, now = self._compiled(run_round)(
            plan, *self._models(), self.call.rule, self._processors, state, races, self._numbers(plan)
        )
        return gamma, out, state._replace(last=last, held=now)

    def _in_blocks(
        self, limits: Sequence[int], held: list[int], state: RoundState, only: int | None = None
    ) -> tuple[int, torch.Tensor, RoundState]:
        """A round of one function for each block of drafted tokens, and one for the rest; returns as `_at_once`.

        `only`: draft one block, and verify as many tokens.
        """
        gamma, stop = 0, self.call.stop.settings
        plan, progress, blocks, more = self._plan(DRAFT_CHUNK), first_progress(state), list[DraftedBlock](), True
        draft = self._compiled(draft_block)
        while more:
            self._reserve(max(held) + gamma + DRAFT_CHUNK + 1)
            races = self._races(plan, gamma)
            block, progress, goes_on = draft(plan, self.draft.tensors, stop, self._processors, state, progress, races)
            blocks.append(block)
            gamma += DRAFT_CHUNK
            more = only is None and gamma < max(limits) and bool(goes_on)  # a look at the device
        size = only or next(size for size in self.sizes if size >= gamma)
        self._reserve(max(held) + size + 1)
        plan, drafted = self._plan(size), DraftedBlock.join(blocks, size)
        numbers, processors = self._numbers(plan), self._processors
        out, last, now = self._compiled(finish_round)(
            plan, self.target.tensors, self.call.rule, processors, state, drafted, progress.lengths, numbers
        )
        return gamma, out, state._replace(last=last, held=now)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        models = [(model.model, model.signature) for model in (self.target, self.draft)]
        return compiled_once(function, self.target.compilation, models)

    @property
    def _processors(self) -> Any:
        return self.call.processing.processors

    def _models(self) -> tuple[Block, Block]:
        return self.target.tensors, self.draft.tensors

    def _reserve(self, tokens: int) -> None:
        for model in (self.target, self.draft):
            model.cache.reserve(tokens)

    def _plan(self, gamma: int) -> RoundPlan:
        return RoundPlan(gamma, self.drafter.sampling, self.drafter.reads_probs, self.call.vocabulary)

    def _where(self, limits: Sequence[int], held: list[int]) -> RoundState:
        """Where the rows stand: as the last round left it on the device, unless a row has ended or left, or drafts another number."""
        rows = self.call.rows
        if self._state is not None and self._known == (held, list(limits), rows.row_id_list):
            return self._state
        self._pads = torch.tensor(rows.pads, device=self.device)
        last, _ = rows.uncached_tokens([n - 1 for n in held])
        # Copies: a graph is also of its inputs' strides, and of whether they were made in inference mode.
        return RoundState(
            last.clone(memory_format=torch.contiguous_format),
            torch.tensor(held, device=self.device),
            torch.tensor(limits, device=self.device),
            rows.row_ids.clone(),
            self.ends,
        )

    def _races(self, plan: RoundPlan, first: int) -> list[torch.Tensor] | None:
        """The random numbers that draw the drafted tokens of places `first` …, in the order in which single steps draw them."""
        if not plan.sampling:
            return None
        order, randomness = self.call.rows.row_ids, self.call.randomness
        places = range(first, first + plan.gamma)
        return [randomness.exponentials(order, place, plan.vocabulary, self.device) for place in places]

    def _numbers(self, plan: RoundPlan) -> RoundNumbers:
        """The random numbers that decide about the draft."""
        order, randomness = self.call.rows.row_ids, self.call.randomness
        if not plan.sampling and not self.call.rule.rule.needs_coins:
            return RoundNumbers(None, None)
        coins = randomness.uniforms(order, plan.gamma, self.device)
        if not plan.sampling:
            return RoundNumbers(None, coins)
        return RoundNumbers(randomness.exponentials(order, BONUS_PLACE, plan.vocabulary, self.device), coins)


def asks_nothing_else(stop: StopRun) -> bool:
    """Whether what a stop says of a token is a function of the draft's logits alone, in tensors."""
    settings = stop.settings
    if not settings.adaptive:
        return True
    ours = type(settings).should_stop.__module__.startswith(__package__.partition(".")[0] + ".")
    return type(stop) is StopRun and ours and settings.features is None and settings.patience == 1


def layers_of_a_round(call: Call, target: StaticRowModel, draft: StaticRowModel) -> int:
    """How many layers the largest of a round's graphs has: drafting is unrolled; behind an adaptive stop the target has a graph of its own."""
    stop, verified = call.stop.settings, len(target.cache.layers)
    if stop.adaptive:
        return max(len(draft.cache.layers) * DRAFT_CHUNK, verified)
    return len(draft.cache.layers) * stop.longest + verified


def why_not_compiled(call: Call) -> str | None:
    """Why the rounds of this call cannot be one compiled function, or None."""
    drafter = call.drafter
    if not isinstance(call.target, StaticRowModel):
        return "the target cannot be rolled back in place"
    if not (
        drafter.is_plain_model and isinstance(drafter, AssistantRun) and isinstance(drafter.model, StaticRowModel)
    ):
        return "what drafts is no model that can be rolled back in place"
    for model in (call.target, drafter.model):
        if not model.is_ready() and model.eager_because is not None:
            return model.eager_because
    if not call.target.device == drafter.model.device == call.rows.ids.device:
        return "target and draft are on two devices"
    layers = layers_of_a_round(call, call.target, drafter.model)
    reasons = {
        f"its rounds would be graphs of {layers} layers, more than {MOST_LAYERS}": layers > MOST_LAYERS,
        "the stop remembers what it has seen, or is the caller's own": not asks_nothing_else(call.stop),
        "a head reads hidden states": bool(drafter.taps) or call.rule_tap is not None,
        "a filter chooses what is verified": type(call.policy.filter) is not VerifyAll,
        "the rule keeps a state": call.rule.keeps_state,
        "a logits processor reads the text": call.processing.needs_prefix,
        "scores or logits are kept": call.keep_scores or call.keep_logits or call.rows.keeps_scores,
        "rounds are watched": call.on_round is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
