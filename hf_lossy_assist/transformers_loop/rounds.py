"""A round of Transformers' assisted generation: the policy's stop ends the draft, its filter cuts it, and its rule accepts it."""

import threading
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

from ..artifacts.features import FeatureTap
from ..batch.randomness import Randomness
from ..drafters.base import fit_vocabulary
from ..engine.call import PositionLimits
from ..engine.loop import check_limits
from ..models.row_model import RowModel
from ..policy.policy import LossyPolicy
from ..round import Draft, Selection, Verified
from ..rules import RuleRun, Strict, accept
from ..stats.clock import Clock
from ..stats.speculation import Record, RowStats
from ..stops import StopRun
from ..tensors import refuse_unfit


def process(processors: LogitsProcessorList, text: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Run `processors` at the last positions of `text` (1, length) and the next, (1, Q, V) → (1, Q, V); they may change `logits`."""
    if not len(processors):
        return logits
    first = text.shape[1] - logits.shape[1] + 1
    ends = enumerate(logits.unbind(dim=1), first)
    return torch.stack([processors(text[:, :end], scores) for end, scores in ends], dim=1)


class AcceptanceProcessor(LogitsProcessor):
    """A processor that applies a rule to a whole round, in place of the call's processors.

    At a round's first position, this runs `processors` at all positions, and the rule on the round. It then gives the token that each
    position commits all probability, so that the loop commits the rule's decision.

    Args:
        rule: the run of the call's rule.
        processors: the call's.
        target: hooked while it reads a round; only forwards of the call's thread count.
        tap: records the target's hidden states for the rule's head, or None.
        clock: shared with the generator.
        stats: of the call's only row.
    """

    def __init__(
        self,
        rule: RuleRun,
        processors: LogitsProcessorList,
        target: PreTrainedModel,
        tap: FeatureTap | None,
        clock: Clock,
        stats: RowStats,
    ):
        self.rule, self.processors, self.target, self.tap = rule, processors, target, tap
        self.clock, self.stats, self.randomness = clock, stats, Randomness()
        self.reading = ExitStack()  # open while the target reads a round

    def begin(self, candidates: torch.Tensor, selection: Selection, sent: int) -> None:
        """Begin a round with the text and `sent` candidates, (1, length + sent), before the target reads it."""
        self.candidates, self.selection, self.sent = candidates, selection, sent
        self.chosen: list[int] = []
        fed = sent + 1 if self.stats.num_spec_steps else candidates.shape[1]
        if self.tap is not None:
            self.reading.enter_context(self.tap)
        self.reading.enter_context(self.clock.time("target", (1, fed)))
        self.reading.callback(self.target.register_forward_hook(partial(self._take, threading.get_ident())).remove)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Return scores (1, V) in which one token is certain."""
        slot = input_ids.shape[1] - self.candidates.shape[1] + self.sent
        if slot == 0:
            self._decide(scores.device)
        token = self.chosen[min(slot, len(self.chosen) - 1)]  # after a rejected token the answer has no effect
        out = torch.full_like(scores, float("-inf"))
        out[:, token] = 0.0
        return out

    def end(self, scores: torch.Tensor, taken: int) -> int:
        """Record the `taken` tokens of the round, write the target's processed logits into `scores` (1, Q, V), and return n."""
        scores.copy_(self.processed)
        planned = self.accepted + 1
        self.stats.record(self.record._replace(taken=min(taken, planned)))
        for _ in range(taken - planned):
            self.stats.record(Record(0, 0, 0, (), 1))
        return self.accepted

    def _take(self, thread: int, module: torch.nn.Module, args: object, output: Any) -> None:
        """Take the raw logits (1, Q, V) and the states of the target's forward, and end the hooks."""
        if threading.get_ident() == thread:
            self.raw, self.states = output.logits, None if self.tap is None else self.tap.latest
            self.reading.close()

    def _decide(self, device: torch.device) -> None:
        selection, sent, draft = self.selection, self.sent, self.selection.draft
        # A copy, since the loop overwrites the logits with the answers.
        raw = self.raw[:, -sent - 1 :].to(device, torch.float32, copy=True)
        accepts = self._judge(draft, self.states)
        del self.raw, self.states
        self.processed = process(self.processors, self.candidates, raw)
        logits = torch.nn.functional.pad(self.processed, (0, 0, 0, draft.gamma - sent))
        self.verified = verified = Verified(selection, logits, accepts)
        verdict = accept(self.rule, verified, self.randomness)
        n, token = int(verdict.accepted), int(verdict.token)
        drafted, lossy = draft.tokens[0].tolist(), verdict.lossy[0].long().tolist()
        unchecked = [] if verdict.unchecked is None else verdict.unchecked[0].long().tolist()
        overshoot = () if verdict.overshoot is None else verdict.overshoot[0].tolist()
        self.accepted, self.record = n, Record(int(draft.lengths), sent, n, lossy, n + 1, unchecked, overshoot)
        self.chosen = [*drafted[:n], token]
        # If the correction equals the rejected token, the loop takes it for accepted and goes on: append the target's tokens.
        while len(self.chosen) <= sent and self.chosen[-1] == drafted[len(self.chosen) - 1]:
            slot = len(self.chosen)
            alone = Selection(
                Draft(self.candidates[:, :0], draft.lengths * 0, draft.row_ids, 0, draft.sampling), draft.lengths * 0
            )
            rest = Verified(alone, self.processed[:, slot : slot + 1])
            self.chosen.append(int(accept(RuleRun(Strict()), rest, self.randomness).token))
        highest = self.processed[0, : len(self.chosen)].amax(dim=-1)
        if not bool(highest.isfinite().all()):
            raise ValueError(
                f"the target model or a logits processor gave NaN or infinite logits, after {self.stats.num_new_tokens} new tokens"
            )

    def _judge(self, draft: Draft, states: torch.Tensor | None) -> torch.Tensor | None:
        """Return which drafted tokens the rule's head accepts, (1, γ) bool; None: the rule has no head."""
        spec = self.rule.rule.features
        if spec is None or draft.gamma == 0:
            return None
        inputs = []
        if spec.reads("draft"):
            assert draft.hidden is not None
            inputs.append(draft.hidden)
        if spec.reads("target"):
            assert states is not None
            states = states[:, -self.sent - 1 :].to(draft.tokens.device)
            first = 0 if spec.position == "predicting" else 1
            states = states[:, first : first + self.sent]
            inputs.append(torch.nn.functional.pad(states, (0, 0, 0, draft.gamma - self.sent)))
        with self.clock.time("head"):
            judged = self.rule.rule.judge(torch.cat(inputs, dim=-1))
        return refuse_unfit(judged, draft.tokens.shape, torch.bool, self.rule.rule, "judge")


class DraftCriterion(StoppingCriteria):
    """A criterion that calls a stop after each token of a draft of up to `limit` tokens, with the hidden states that its head reads.

    `hidden`: the states for the rule's head, recorded by `states` at each token, (1, H) each.
    """

    def __init__(self, run: StopRun, limit: int, clock: Clock, tap: FeatureTap | None, states: FeatureTap | None):
        self.run, self.limit, self.clock, self.tap, self.states = run, limit, clock, tap, states
        self.hidden: list[torch.Tensor] = []
        self.drafted = 0

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...], **kwargs: object) -> torch.Tensor:
        self.drafted += 1
        if self.states is not None:
            self.hidden.append(self.states.at(-1))
        if self.run.settings.adaptive:
            self.run.drafting([0] if self.drafted < self.limit else [])
        with nullcontext() if self.tap is None else self.clock.time("head"):
            features = None if self.tap is None else self.tap.at(-1)
            return self.run.after_token(input_ids, scores, rows=[0], features=features)


class PolicyCandidateGenerator(CandidateGenerator):
    """A candidate generator on the draft's `generate`, which the policy's stop ends and its filter cuts.

    It returns no logits: `AcceptanceProcessor`, which has the distributions, decides, and encodes the decision in the target's scores.

    Args:
        drafting: Transformers' generator for this call; it runs the draft model on a cache.
        policy, stop: the call's policy, and the run of its stop.
        acceptance: decides on the candidates.
        processors: the call's, for the companion.
        companion: read by the filter, on a cache of one row, or None.
        sampling, clock: the call's.
        positions: limits from the models' position tables.
    """

    def __init__(
        self,
        drafting: AssistedCandidateGenerator,
        policy: LossyPolicy,
        stop: StopRun,
        acceptance: AcceptanceProcessor,
        processors: LogitsProcessorList,
        companion: RowModel | None,
        sampling: bool,
        clock: Clock,
        positions: PositionLimits,
    ):
        self.drafting, self.policy, self.stop, self.acceptance = drafting, policy, stop, acceptance
        self.processors, self.companion, self.sampling, self.clock = processors, companion, sampling, clock
        self.positions = positions
        for config in (drafting.assistant_generation_config, drafting.generation_config):
            config.assistant_confidence_threshold = 0.0  # disables Transformers' stop
        draft: PreTrainedModel = drafting.assistant_model
        of_stop, of_rule = stop.settings.features, policy.rule.features
        self.tap = None if of_stop is None else FeatureTap(draft, of_stop)
        self.states = None if of_rule is None or not of_rule.reads("draft") else FeatureTap(draft, of_rule)
        self.reads_probs = sampling or companion is not None or policy.rule.needs_draft_probs

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        """Return the text (1, length) with the drafted tokens that the target reads, and None."""
        (limit,) = check_limits(self.stop.begin_round([0]), [0], self.stop.settings)
        length = input_ids.shape[1] - 1
        self.positions.check_row(length, "the row")
        (limit,) = self.positions.room([limit], [length])
        draft = self._draft(input_ids, limit)
        companion = None
        if self.companion is not None and draft.gamma and self.policy.filter.reads_companion(1):
            companion = self._companion_probs(self.companion, input_ids, draft)
        selection = self.policy.filter.select(draft, companion, Randomness().for_filters())
        sent = int(selection.sent[0])
        candidates = torch.cat([input_ids, selection.draft.tokens[:, :sent]], dim=1)
        self.acceptance.begin(candidates, selection, sent)
        return candidates, None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Record the round, and replace `scores` by the target's processed ones, which the loop returns."""
        length, sent = input_ids.shape[1] - int(num_matches) - 1, self.acceptance.sent
        selection = self.acceptance.verified.selection
        accepted = self.acceptance.end(scores, int(num_matches) + 1)
        if self.companion is not None:
            valid = selection.valid_prefix_lengths([length + accepted], [accepted])
            self.companion.rollback([min(pair) for pair in zip(self.companion.lengths, valid, strict=True)])
        self.stop.observe([0], [sent], [accepted])

    def _draft(self, input_ids: torch.Tensor, limit: int) -> Draft:
        """Draft up to `limit` tokens, as far as the text has room."""
        inner, device = self.drafting, input_ids.device
        row = torch.zeros(1, dtype=torch.int64, device=device)
        ids = input_ids.to(inner.assistant_model.device)
        inner.num_assistant_tokens = limit
        shortest, longest = inner._calculate_new_tokens(ids)
        if longest <= 0:
            return Draft(input_ids[:, :0], row, row, 0, self.sampling)
        steps = DraftCriterion(self.stop, longest, self.clock, self.tap, self.states)
        with ExitStack() as taps:
            for tap in (self.tap, self.states):
                if tap is not None:
                    taps.enter_context(tap)
            text, logits = self._generate(ids, shortest, longest, steps)
            hidden = steps.hidden
            if self.states is not None and self.states.spec.position == "token":
                # A token's state is computed one forward later; for the last one, run a step whose token is discarded.
                self._generate(text, 0, 1, None)
                hidden = [*hidden[1:], self.states.at(-1)]
        tokens = text[:, input_ids.shape[1] :].to(device)
        return Draft(
            tokens,
            torch.full_like(row, tokens.shape[1]),
            row,
            longest,
            self.sampling,
            probs=logits.to(device, torch.float32).softmax(dim=-1) if self.reads_probs else None,
            hidden=torch.stack(hidden, dim=1).to(device) if hidden else None,
        )

    def _generate(
        self, ids: torch.Tensor, shortest: int, longest: int, steps: DraftCriterion | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the draft's `generate` after `ids`; return the text and the processed logits of its new tokens."""
        inner = self.drafting
        if steps is None:  # no crop: after one, sliding windows could not be rolled back
            of_kind, length = inner.assistant_model.config.is_encoder_decoder, ids.shape[1]
            for prepare in (_prepare_attention_mask, _prepare_position_ids):
                inner.assistant_kwargs = prepare(inner.assistant_kwargs, length, of_kind)
            inner.assistant_kwargs = _prepare_token_type_ids(inner.assistant_kwargs, length)
        else:
            inner._update_past_and_masks(ids)
        arguments = inner._prepare_generation_args(ids, shortest, longest)
        criteria = StoppingCriteriaList([] if steps is None else [steps])
        with self.clock.time("draft"):
            text, logits = inner._generate_candidates(arguments | {"stopping_criteria": criteria})
        self.clock.forwards["draft"] += logits.shape[1] - 1
        return text, logits

    def _companion_probs(self, companion: RowModel, input_ids: torch.Tensor, draft: Draft) -> torch.Tensor:
        """Run the companion over the draft; return its distributions at each drafted position and the next, (1, γ + 1, V) float32."""
        text = torch.cat([input_ids, draft.tokens], dim=1)
        with self.clock.time("companion"):
            new = text[:, companion.lengths[0] :]
            raw = companion.feed(new, [new.shape[1]], keep=draft.gamma + 1)
        assert draft.probs is not None
        raw = fit_vocabulary(raw.to(text.device, torch.float32), draft.probs.shape[-1])
        return process(self.processors, text, raw).softmax(dim=-1)
