"""Logits processors over a whole block at once, each position with the prefix that belongs to it."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


# These look at the scores alone, so one call does for all rows and positions.
PREFIX_FREE = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    SuppressTokensLogitsProcessor,
)


class Processing:
    """A `LogitsProcessorList`, and whether it needs each token's prefix."""

    def __init__(self, processors: LogitsProcessorList):
        self.processors = processors
        self.needs_prefix = not all(isinstance(p, PREFIX_FREE) for p in processors)

    def __call__(self, ids: torch.Tensor, lengths: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """Process `scores` (B, Q, V) float32, where position i of row b follows `ids[b, : lengths[b] + i]`; → (B, Q, V)."""
        if not self.processors:
            return scores
        batch, width, size = scores.shape
        if not self.needs_prefix:
            nothing = ids[:, :0].repeat_interleave(width, dim=0)
            return self.processors(nothing, scores.reshape(-1, size)).view(batch, width, size)
        out = torch.empty_like(scores)
        for i in range(width):
            if len(set(lengths)) == 1:
                out[:, i] = self.processors(ids[:, : lengths[0] + i], scores[:, i].clone())
                continue
            for b, length in enumerate(lengths):
                out[b, i] = self.processors(ids[b : b + 1, : length + i], scores[b : b + 1, i].clone())[0]
        return out
