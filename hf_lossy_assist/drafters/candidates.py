"""One of Transformers' candidate generators as a drafter, at batch 1: prompt lookup, early exit, another tokenizer."""

from collections.abc import Sequence

import torch
from transformers.generation import CandidateGenerator

from ..batch.positions import TableEnds
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..round import Draft, Verified
from ..stats.clock import Clock
from .base import DrafterRun


class CandidateRun(DrafterRun):
    """One of Transformers' candidate generators, at batch 1: prompt lookup, early exit, another tokenizer."""

    def __init__(self, generator: CandidateGenerator, vocabulary: int, sampling: bool, clock: Clock):
        self.generator, self.vocabulary, self.sampling, self.clock = generator, vocabulary, sampling, clock

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        text = rows.texts()[0][None]
        with self.clock.time("draft"):
            try:
                with randomness.everywhere(rows.index[0], text.device):
                    candidates, logits = self.candidates(text)
            except TableEnds:  # for good: the text only grows
                candidates, logits = text, None
        tokens = candidates[:, text.shape[1] :][:, : limits[0]].to(rows.ids.device)
        gamma = tokens.shape[1]
        probs = None
        if self.sampling and logits is not None and gamma:
            logits = logits[:, :gamma, : self.vocabulary].to(device=rows.ids.device, dtype=torch.float32)
            probs = logits.softmax(dim=-1)
        lengths = torch.tensor([gamma], device=rows.ids.device)
        return Draft(tokens, lengths, rows.order, max(limits), self.sampling, probs)

    def candidates(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The text (1, n) with what the generator proposes behind it, and the logits that the tokens were chosen by."""
        return self.generator.get_candidates(text)

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        text = rows.texts()[0][None]
        self.generator.update_candidate_strategy(text, verified.logits, accepted[0])

    def select(self, keep: Sequence[int]) -> None:
        if list(keep) != [0]:
            raise AssertionError(f"a candidate generator serves one row; asked for {list(keep)}")
