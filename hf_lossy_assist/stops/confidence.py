"""Stops without training, on the drafted token's probability or the draft's entropy."""

from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..registry.frozen import Amount, DraftLength, Share
from .base import DraftStop, Scores, entropy


SVIPForm = Literal["bound", "entropy"]


class Confidence(DraftStop, name="confidence", paper="Transformers"):
    """Stop after a token whose draft probability is below `threshold`; Transformers' `assistant_confidence_threshold`.

    `threshold=0` never stops early. Transformers' default is 0.4 with at most 20 tokens. `reads="head"` compares what the drafter estimates
    itself, the probability that its token is accepted: the confidence head of DSpark (huggingface.co/papers/2607.05147), whose authors drop
    the doubtful token.
    """

    threshold: Share = 0.4
    max_draft: DraftLength = 20
    reads: Literal["probability", "head"] = "probability"

    @property
    def reads_confidence(self) -> bool:
        return self.reads == "head"

    def check(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        if self.reads_confidence and not getattr(draft, "gives_confidence", False):
            raise ValueError(
                f'Confidence(reads="head"): {type(draft).__name__} has no confidence head: leave reads out'
            )

    def should_stop(
        self, input_ids: torch.Tensor, scores: Scores, features: torch.Tensor | None = None, **kwargs: object
    ) -> torch.Tensor:
        if not self.reads_confidence:
            q = scores[-1].float().softmax(dim=-1)
            return q.gather(-1, input_ids[:, -1:].to(q.device)).squeeze(-1) < self.threshold
        if features is None:
            raise ValueError('Confidence(reads="head"): this loop passes no confidence on: leave reads out')
        return ~(features[:, 0] >= self.threshold)  # NaN stops too


class SVIP(DraftStop, name="svip", paper="2411.18462"):
    """Stop after a token whose draft entropy H makes acceptance unlikely: √(c·H) > h, H in nats.

    Zhang et al., SVIP (huggingface.co/papers/2411.18462), Eq. 6: the acceptance rate is at least about 1 − √(c·H). Two forms:

    - `form="bound"` (the authors' code): √(c·H) > h with c = 0.15, h = 0.3, i.e. H > 0.60 nats;
    - `form="entropy"` (Eq. 7 taken literally): √H > h; with the paper's h = 0.3, i.e. H > 0.09 nats.

    The uncertain token stays in the draft, which has 1 to `max_draft` tokens (40 in the paper). `h=math.inf` never stops early.
    """

    h: Amount = 0.3
    c: Amount = 0.15
    form: SVIPForm = "bound"
    max_draft: DraftLength = 40

    def should_stop(self, input_ids: torch.Tensor, scores: Scores, **kwargs: object) -> torch.Tensor:
        scale = self.c if self.form == "bound" else 1.0
        return (scale * entropy(scores[-1])).sqrt() > self.h
