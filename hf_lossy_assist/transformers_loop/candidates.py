"""Draft in Transformers' assisted generation until the policy's stop ends the draft, and apply the policy's filter."""

from contextlib import ExitStack, nullcontext

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
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
from ..round import Draft
from ..stats.clock import Clock
from ..stops import StopRun
from .processors import AcceptanceProcessor, process


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
        assert draft.probs is not None, "they are kept where there is a companion"
        raw = fit_vocabulary(raw.to(text.device, torch.float32), draft.probs.shape[-1])
        return process(self.processors, text, raw).softmax(dim=-1)
