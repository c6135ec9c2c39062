"""Predict the draft's tokens along a response, as `generate` would choose them; a search tries the positions where they differ from it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ...batch.callers_code import serves_any_prompt
from ...batch.logits_processing import Processing
from ...models.introspection import device_of, end_tokens
from ...models.row_model import RowModel


CHUNK = 256  # positions whose logits are computed together: 150 MB for a vocabulary of 150 000


class GumbelNoise(LogitsProcessor):
    """Noise with which the argmax is the Gumbel-max sample of a random state (Appendix A).

    argmax_i log P(i | text) + g_i, with g drawn from a seed that is a hash of (state, text): a sample of P that is the
    same for the same state and text in any batch, and shared by target and draft. P is the softmax of the scores after
    `warpers`.
    """

    def __init__(self, state: int, warpers: Sequence[LogitsProcessor] = ()):
        self.state, self.warpers = state, LogitsProcessorList(warpers)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.add(input_ids.tolist(), self.warpers(input_ids, scores))

    def add(self, texts: Sequence[list[int]], scores: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities (N, V) of `scores` with the noise after each of `texts`."""
        noise = torch.stack([self.draw(text, scores.shape[-1]) for text in texts])
        return scores.log_softmax(dim=-1) + noise.to(scores.device)

    def draw(self, text: Sequence[int], size: int) -> torch.Tensor:
        """Draw the noise (size,) float32 after `text`."""
        content = np.array([self.state, *text], dtype=np.int64).tobytes()
        seed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
        uniform = torch.empty(size, dtype=torch.float32)
        return uniform.exponential_(generator=torch.Generator().manual_seed(seed)).log().neg()


class Sampler:
    """Choice of the draft's next token of each text: the argmax of its processed logits, plus noise if there is any."""

    def __init__(self, processors: LogitsProcessorList, noise: GumbelNoise | None = None):
        self.processing, self.noise = Processing(processors, 1), noise

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
        scores = scores if self.noise is None else self.noise.add(texts, scores)
        return scores.argmax(dim=-1).tolist()


@dataclass(frozen=True)
class Decoding:
    """How `model.generate` would decode: its processors, those of them that sampling adds, and its end tokens."""

    processors: LogitsProcessorList
    warpers: Sequence[LogitsProcessor]
    ends: set[int]


def prepare_decoding(model: PreTrainedModel, new_tokens: int, settings: Mapping[str, object]) -> Decoding:
    """Return how `model.generate` would write up to `new_tokens` under the sampling `settings`.

    Raises: `ValueError` if the model's generation config sets a processor that is no function of the text alone.
    """
    calls: list[dict[str, Any]] = []

    def record(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> torch.Tensor:
        calls.append(prepared)
        return input_ids

    ids = torch.zeros(1, 1, dtype=torch.int64, device=device_of(model))
    for options in ({"do_sample": False}, settings):
        config = GenerationConfig(max_new_tokens=new_tokens, pad_token_id=0, **options)
        type(model).generate(
            model, ids, attention_mask=torch.ones_like(ids), generation_config=config, custom_generate=record
        )
    greedy, processors = (call["logits_processor"] for call in calls)
    wrong = [processor for processor in processors if not serves_any_prompt(processor)]
    if [type(processor) for processor in greedy] != [type(processor) for processor in processors[: len(greedy)]]:
        wrong.append(processors[-1])  # follows those that sampling adds
    if wrong:
        raise ValueError(
            f"the generation config of {type(model).__name__} sets a {type(wrong[0]).__name__}, which depends on where "
            "a prompt ends or on what was sampled: mining needs functions of the text, set its option to None"
        )
    return Decoding(processors, processors[len(greedy) :], end_tokens(calls[1]["generation_config"]))


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
