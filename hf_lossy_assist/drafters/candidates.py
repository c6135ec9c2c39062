"""One of Transformers' candidate generators as a drafter, at batch 1: prompt lookup, early exit, another tokenizer."""

from collections.abc import Sequence

import torch
from transformers.generation import CandidateGenerator

from ..batch.positions import TableEnds
from ..batch.rows import Rows
from ..registry import register_drafter
from ..round import Block
from ..stats.clock import Clock


class CandidateDrafter:
    """One of Transformers' candidate generators, at batch 1: prompt lookup, early exit, another tokenizer."""

    def __init__(self, generator: CandidateGenerator, vocabulary: int, sampling: bool, clock: Clock):
        self.generator, self.vocabulary, self.sampling, self.clock = generator, vocabulary, sampling, clock

    def propose(self, rows: Rows, limits: Sequence[int]) -> Block:
        text = rows.prompts()[0][None]
        with self.clock.time("draft"):
            try:
                candidates, logits = self.generator.get_candidates(text)
            except TableEnds:  # for good: the text only grows
                candidates, logits = text, None
        tokens = candidates[:, text.shape[1] :][:, : limits[0]].to(rows.ids.device)
        gamma = tokens.shape[1]
        q = None
        if self.sampling and logits is not None and gamma:
            q = logits[:, :gamma, : self.vocabulary].to(device=rows.ids.device, dtype=torch.float32).softmax(dim=-1)
        rows.write(tokens)
        return Block(tokens, torch.tensor([gamma], device=rows.ids.device), q, self.sampling)

    def learn(self, rows: Rows, block: Block, accepted: Sequence[int]) -> None:
        text = rows.prompts()[0][None]
        self.generator.update_candidate_strategy(text, block.scores, accepted[0])

    def select(self, keep: Sequence[int]) -> None:
        if list(keep) != [0]:
            raise AssertionError(f"a candidate generator serves one row; asked for {list(keep)}")


register_drafter(
    "candidates", CandidateDrafter, paper="Transformers",
    summary="One of Transformers' candidate generators: prompt lookup, early exit, a draft with another tokenizer.",
)  # fmt: skip
