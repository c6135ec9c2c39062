"""Logits processors over a whole block at once, each position with the prefix that belongs to it."""

import copy
from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
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


def of_row(processors: LogitsProcessorList, row: int, batch: int) -> LogitsProcessorList:
    """The same processors for row `row` of `batch` alone: four of Transformers' keep something for each row of a batch."""
    out = LogitsProcessorList()
    for processor in processors:
        own = copy.copy(processor)
        if isinstance(own, PrefixConstrainedLogitsProcessor):
            allowed, own._num_beams = own._prefix_allowed_tokens_fn, 1
            own._prefix_allowed_tokens_fn = lambda _, ids, allowed=allowed: allowed(row, ids)
        elif isinstance(own, RepetitionPenaltyLogitsProcessor) and isinstance(own.prompt_ignore_length, torch.Tensor):
            own.prompt_ignore_length = own.prompt_ignore_length[row : row + 1]
        elif isinstance(own, EncoderRepetitionPenaltyLogitsProcessor):
            prompt = row * own.encoder_input_ids.shape[0] // batch  # one for all `num_return_sequences` of it
            own.encoder_input_ids = own.encoder_input_ids[prompt : prompt + 1]
        elif isinstance(own, EncoderNoRepeatNGramLogitsProcessor):
            prompt = row * own.batch_size // batch
            own.batch_size, own.generated_ngrams = 1, own.generated_ngrams[prompt : prompt + 1]
        out.append(own)
    return out


class Processing:
    """A `LogitsProcessorList`, and whether it needs each token's prefix."""

    def __init__(self, processors: LogitsProcessorList, batch: int):
        """`batch`: how many rows the call has."""
        self.processors, self.batch = processors, batch
        self._of_rows: dict[int, LogitsProcessorList] = {}
        self.needs_prefix = not all(isinstance(p, PREFIX_FREE) for p in processors)

    def __call__(
        self, ids: torch.Tensor, lengths: Sequence[int], scores: torch.Tensor, index: Sequence[int]
    ) -> torch.Tensor:
        """Process `scores` (B, Q, V) float32, where position i of row b follows `ids[b, : lengths[b] + i]`; → (B, Q, V).

        `index[b]`: which row of the call row b is.
        """
        if not self.processors:
            return scores
        batch, width, size = scores.shape
        if not self.needs_prefix:
            nothing = ids[:, :0].repeat_interleave(width, dim=0)
            return self.processors(nothing, scores.reshape(-1, size)).view(batch, width, size)
        out = torch.empty_like(scores)
        together = len(set(lengths)) == 1 and len(index) == self.batch
        for i in range(width):
            if together:
                out[:, i] = self.processors(ids[:, : lengths[0] + i], scores[:, i].clone())
                continue
            for b, length in enumerate(lengths):
                if index[b] not in self._of_rows:
                    self._of_rows[index[b]] = of_row(self.processors, index[b], self.batch)
                own = self._of_rows[index[b]]
                out[b, i] = own(ids[b : b + 1, : length + i], scores[b : b + 1, i].clone())[0]
        return out
