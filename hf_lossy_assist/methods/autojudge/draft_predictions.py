"""Predict the draft's tokens along a response; a search tries the positions where they differ from it."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from ...drafters.hidden_state import HiddenStateDrafter
from ...models.row_model import RowModel
from .generation_backend import Sampler
from .prefixes import PrefixReader, count_shared


CHUNK = 256  # positions whose logits are computed together: 150 MB for a vocabulary of 150 000
Predict = Callable[[list[int], int], list[int]]  # the draft's tokens for positions `start` … of a response


class DraftPredictions:
    """Predictions of a draft model after each prefix of a response, from one forward over what is new in the response."""

    def __init__(self, draft: PreTrainedModel, prompt: list[int], limit: int, vocabulary: int, sampler: Sampler):
        """Take `vocabulary`: the target's size; ids that only one of the models has are never chosen."""
        self.reader, self.prompt = PrefixReader(RowModel(draft, 1, limit, vocabulary)), prompt
        self.vocabulary, self.sampler = vocabulary, sampler

    @torch.inference_mode()
    def __call__(self, response: list[int], start: int) -> list[int]:
        """Predict positions `start` … of `response`, of which a search does not change what is before `start`."""
        # The logits at `first` predict position `start`.
        text, first = self.prompt + response, len(self.prompt) + start - 1
        model, out = self.reader.read(text[:first], len(self.prompt)).copy(), list[int]()
        for place in range(first, len(text) - 1, CHUNK):
            piece = text[place : min(place + CHUNK, len(text) - 1)]
            model.rollback([place])
            logits = model.feed(torch.tensor([piece]), [len(piece)])[0][:, : self.vocabulary].float()  # (≤ CHUNK, V)
            missing = self.vocabulary - logits.shape[-1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
            out += self.sampler([text[: end + 1] for end in range(place, place + len(piece))], logits)
        return out


class StatesPredictions:
    """Predictions of a drafter on the target's states, in drafts of `places` tokens, after each prefix of a response.

    The target reads what is new in a response in a separate forward, since the search never has the states of the final text.
    """

    @torch.inference_mode()
    def __init__(
        self,
        drafter: HiddenStateDrafter,
        target: PreTrainedModel,
        prompt: list[int],
        limit: int,
        sampler: Sampler,
        places: int,
    ):
        self.drafter, self.target, self.prompt, self.sampler, self.places = drafter, target, prompt, sampler, places
        self.reader, self.model = drafter.hook(target), RowModel(target, 1, limit)
        self.cached: list[int] = []
        self.states: torch.Tensor | None = None  # of the tokens in `cached`, (1, n, layers · H)

    @torch.inference_mode()
    def __call__(self, response: list[int], start: int) -> list[int]:
        """Predict positions `start` … of `response`. After a text of one token there is no prediction; the response's token is returned."""
        text, first = self.prompt + response, len(self.prompt) + start
        unpredicted = response[start : start + max(2 - first, 0)]
        first = max(first, 2)
        if first >= len(text):
            return unpredicted
        states = self._read(text[:-2])[0]
        logits = self.drafter.logits_along(
            self.target, torch.tensor(text[:-1]), states, len(text) - first, self.places
        )
        return unpredicted + self.sampler([text[:end] for end in range(first, len(text))], logits.float())

    def _read(self, text: list[int]) -> torch.Tensor:
        """Return the target's states of `text`; only what differs from the previous text is read."""
        shared = count_shared(self.cached, text)
        self.model.rollback([shared])
        parts = [] if self.states is None else [self.states[:, :shared]]
        for place in range(shared, len(text), CHUNK):
            piece = text[place : place + CHUNK]
            with self.reader:
                self.model.feed(torch.tensor([piece]), [len(piece)], keep=0)
                states = self.reader.take_states()
            assert states is not None, "the target has just run"
            parts.append(states)
        self.states, self.cached = torch.cat(parts, dim=1), list(text)
        return self.states
