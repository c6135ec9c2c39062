"""Predict the draft's tokens along a response, as `generate` would choose them; a search tries the positions where they differ from it."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ...batch.callers_code import serves_any_prompt
from ...batch.logits_processing import Processing
from ...models.introspection import device_of, end_tokens
from ...models.row_model import RowModel


CHUNK = 256  # positions whose logits are computed together: 150 MB for a vocabulary of 150 000


class Sampler:
    """Choice of the draft's next token of each text: the argmax of its processed logits."""

    def __init__(self, processors: LogitsProcessorList):
        self.processing = Processing(processors, 1)

    def __call__(self, texts: Sequence[list[int]], logits: torch.Tensor) -> list[int]:
        """Choose one token after each of `texts`, from raw `logits` (N, V). Raises: `ValueError`, one line, if they are NaN or infinite."""
        if not texts:
            return []
        lengths = [len(text) for text in texts]
        ids = torch.zeros(len(texts), 0, dtype=torch.int64, device=logits.device)
        if self.processing.needs_prefix:
            ids = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in texts], device=logits.device)
        scores = self.processing(ids, lengths, logits.float()[:, None], [0] * len(texts))[:, 0]
        if not scores.amax(dim=-1).isfinite().all():
            raise ValueError(
                "the draft model gave NaN or infinite logits in a response: look at its dtype and weights"
            )
        return scores.argmax(dim=-1).tolist()


def prepare_decoding(model: PreTrainedModel, new_tokens: int) -> tuple[LogitsProcessorList, set[int]]:
    """Return the processors and end tokens with which `model.generate` would write up to `new_tokens` greedily.

    Raises: `ValueError` if the model's generation config sets a processor that is no function of the text alone.
    """
    calls: list[dict[str, Any]] = []

    def record(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> torch.Tensor:
        calls.append(prepared)
        return input_ids

    ids = torch.zeros(1, 1, dtype=torch.int64, device=device_of(model))
    config = GenerationConfig(max_new_tokens=new_tokens, pad_token_id=0, do_sample=False)
    type(model).generate(
        model, ids, attention_mask=torch.ones_like(ids), generation_config=config, custom_generate=record
    )
    processors = calls[0]["logits_processor"]
    for processor in processors:
        if not serves_any_prompt(processor):
            raise ValueError(
                f"the generation config of {type(model).__name__} sets a {type(processor).__name__}, which depends on where a "
                "prompt ends: mining needs functions of the text, set its option to None"
            )
    return processors, end_tokens(calls[0]["generation_config"])


class PrefixReader:
    """One row of a model, and the text that it holds: copies of the row read what follows.

    A recurrent state, unlike a cache of keys and values, cannot be rolled back to the beginning that two texts share.
    """

    def __init__(self, model: PreTrainedModel, limit: int, vocabulary: int):
        """`limit`: most tokens of a text; `vocabulary`: token ids that texts may have, more than the model has or fewer."""
        self._sizes = limit, vocabulary
        self.model, self.text = RowModel(model, 1, *self._sizes), list[int]()

    def read(self, text: list[int], prompt: int) -> RowModel:
        """Return the row after it has read `text`, the first `prompt` tokens being the prompt's. Feed a copy, not the row itself.

        It starts again from an empty row if `text` does not begin with what it holds.
        """
        if self.text != text[: len(self.text)]:
            self.model, self.text = RowModel(self.model.model, 1, *self._sizes), []
        begun = len(self.text)
        # A prompt's last token is read with those after it, as in decoding.
        for tokens, keep in ((text[begun : prompt - 1], 0), (text[max(begun, prompt - 1) :], 1)):
            if tokens:
                self.model.feed(torch.tensor([tokens]), [len(tokens)], keep=keep)
        self.model.rollback([len(text)])
        self.text = list(text)
        return self.model


class DraftPredictions:
    """Predictions of a draft model after each prefix of a response, from one forward over what is new in the response."""

    def __init__(self, draft: PreTrainedModel, prompt: list[int], limit: int, vocabulary: int, sampler: Sampler):
        """Take `vocabulary`: the target's size; ids that only one of the models has are never chosen."""
        self.reader, self.prompt = PrefixReader(draft, limit, vocabulary), prompt
        self.vocabulary, self.sampler = vocabulary, sampler

    @torch.inference_mode()
    def __call__(self, response: list[int], start: int) -> list[int]:
        """Predict positions `start` … of `response`, of which a search does not change what is before `start`."""
        # The logits at `first` predict position `start`.
        text, first = self.prompt + response, len(self.prompt) + start - 1
        model, out = self.reader.read(text[:first], len(self.prompt)).copy(), list[int]()
        for begin in range(first, len(text) - 1, CHUNK):
            piece = text[begin : min(begin + CHUNK, len(text) - 1)]
            model.rollback([begin])
            logits = model.feed(torch.tensor([piece]), [len(piece)])[0][:, : self.vocabulary].float()  # (≤ CHUNK, V)
            missing = self.vocabulary - logits.shape[-1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
            out += self.sampler([text[: end + 1] for end in range(begin, begin + len(piece))], logits)
        return out
