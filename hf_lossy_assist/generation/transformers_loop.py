"""This package's stops inside Transformers' own assisted generation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import GenerationMixin, LogitsProcessor, PreTrainedModel, StoppingCriteriaList
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from ..models.introspection import base_of
from ..round import Draft, Selection, Verified
from ..rules import AcceptanceRule, RuleRun
from ..rules.base import accepted_by
from ..rules.pointwise import Pointwise
from ..stops import DraftStop
from ..validation import shown


class StoppingCandidateGenerator(AssistedCandidateGenerator):
    """A `DraftStop` inside Transformers' own assisted generation: its usual draft loop, which also stops where `stop` does.

    `scores` that the stop sees there are the processed ones. `num_assistant_tokens` is the stop's longest draft, and
    Transformers' own confidence stop is off.
    """

    def __init__(self, *args: object, stop: DraftStop, **kwargs: object):
        super().__init__(*args, **kwargs)
        self.run = stop.start(1)
        self.assistant_generation_config.assistant_confidence_threshold = 0.0
        self.generation_config.assistant_confidence_threshold = 0.0
        self.assistant_generation_config.num_assistant_tokens_schedule = "constant"

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.num_assistant_tokens = self.run.begin_round([0])[0]
        candidates, logits = super().get_candidates(input_ids, **kwargs)
        self._drafted = candidates.shape[1] - input_ids.shape[1]
        return candidates, logits

    def _prepare_generation_args(self, *args: object, **kwargs: object) -> dict:
        arguments = super()._prepare_generation_args(*args, **kwargs)
        return arguments | {"stopping_criteria": StoppingCriteriaList([self.run])}

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        self.run.observe([0], [self._drafted], [int(num_matches)])


@contextmanager
def stock_stop(model: PreTrainedModel, stop: DraftStop) -> Iterator[None]:
    """Draft with `stop` in Transformers' assisted generation: `with stock_stop(model, SVIP()): model.generate(**inputs, assistant_model=draft)`."""
    base = base_of(model)
    if not isinstance(base, GenerationMixin):
        raise TypeError(f"stock_stop: expected a Transformers model with generate(), got {type(model).__name__}")
    if not isinstance(stop, DraftStop):
        raise TypeError(f"stock_stop: expected a DraftStop, got {type(stop).__name__}")

    def get_candidate_generator(**given: object) -> StoppingCandidateGenerator:
        if given.get("assistant_model") is None:
            raise ValueError("a draft stop in Transformers' own loop needs assistant_model=…")
        given = {name: value for name, value in given.items() if not name.endswith("_tokenizer")}
        return StoppingCandidateGenerator(**given, stop=stop)

    outer = base.__dict__.get("_get_candidate_generator")
    base._get_candidate_generator = get_candidate_generator
    try:
        yield
    finally:
        del base._get_candidate_generator
        if outer is not None:
            base._get_candidate_generator = outer


class StockRule(LogitsProcessor):
    """A rule without a head for users of the stock loop:
    `model.generate(**inputs, assistant_model=draft, logits_processor=LogitsProcessorList([StockRule(Typical())]))`.

    That loop runs the same processors over the draft's scores and then, with the same prefixes, over the target's; so at the target's
    turn both distributions of a place are known. Greedy, the target's scores are changed so that their argmax is the drafted token where the
    rule keeps it. Sampling, they become log λ, λ = q·a + (1 − Σ q·a)·r the rule's output distribution: strict acceptance of λ, which the stock
    loop does, is then the rule (`Pointwise.output_distribution`). What the loop returns as scores is what was decided by.

    Sampling is exact at temperature 1 without top-k, top-p and other warpers, which Transformers applies after every processor of
    the caller's: pass `temperature=1.0, top_k=0, top_p=1.0`. Neutral: the rule's neutral value.

    Args:
        rule (`Pointwise`): one that judges each drafted token by itself, not by its neighbours or by what was accepted before.
        do_sample: as in the call.

    Raises: `ValueError` where there is no draft model with the target's vocabulary. An object serves one call after another.
    """

    def __init__(self, rule: AcceptanceRule, do_sample: bool = False):
        if not isinstance(rule, Pointwise):
            name = type(rule).__name__
            raise TypeError(
                f"StockRule: expected a rule that judges each token by itself, such as Typical(), got {name}: use lossy_policy={name}(…)"
            )
        if not isinstance(do_sample, bool):
            raise TypeError(f"StockRule.do_sample: expected True or False, got {shown(do_sample)}")
        rule.check_mode(do_sample)
        self.rule, self.do_sample = rule, do_sample
        self._drafts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # prefix and scores of the draft, by length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Return the draft's scores as they are, the target's changed; (1, length) and (1, V)."""
        if input_ids.shape[0] != 1:
            raise ValueError(f"StockRule: the stock assisted loop has one row, this call has {input_ids.shape[0]}")
        prefix, drafted = self._drafts.pop(input_ids.shape[1], (None, None))
        if prefix is None or drafted is None or not torch.equal(prefix, input_ids.to(prefix.device)):
            finite = scores[scores.isfinite()]
            if bool((finite == finite[:1]).all()):
                raise ValueError(
                    "StockRule: these drafts have no distribution (prompt lookup): use lossy_policy=…, or a draft model"
                )
            self._drafts[input_ids.shape[1]] = (input_ids.clone(), scores.clone())
            return scores
        if drafted.shape != scores.shape:
            raise ValueError(
                f"StockRule: the draft has {drafted.shape[1]} token ids, the target {scores.shape[1]}: it needs a draft model with "
                "the target's vocabulary"
            )
        logits, drafted = scores.float(), drafted.to(scores.device, torch.float32)
        if self.do_sample:
            return self.rule.output_distribution(logits, drafted.softmax(dim=-1)).log()
        return logits.scatter(1, self._choice(logits, drafted)[:, None], logits.amax(dim=1, keepdim=True) + 1.0)

    def _choice(self, scores: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """Greedy: the token that this place emits, (1,)."""
        token = drafted.argmax(dim=-1)
        probs, one = drafted.softmax(dim=-1)[:, None], torch.ones_like(token)
        draft = Draft(token[:, None], one, torch.zeros_like(token), planned=1, sampling=False, probs=probs)
        verified = Verified(Selection(draft, one), scores[:, None].expand(-1, 2, -1))
        accepts = accepted_by(RuleRun(self.rule), verified, None)[:, 0]
        return torch.where(accepts, token, self.rule.choice(verified, torch.zeros_like(token)))
