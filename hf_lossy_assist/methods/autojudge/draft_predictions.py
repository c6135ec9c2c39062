"""Predict the draft's tokens along a response; a search tries the positions where they differ from it."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from ...drafters.hidden_state import HiddenStateDrafter
from ...models.row_model import RowModel
from .generation_backend import Sampler
from .prefixes import PrefixReader, count_shared, reserve


CHUNK = 256  # positions whose logits are computed together: 150 MB for a vocabulary of 150 000
Predict = Callable[[list[int], int], list[int]]  # the draft's tokens for positions `start` … of a response


class DraftPredictions:
    """Predictions of a draft model after each prefix of a response, from one forward over what is new in the response."""

    @torch.inference_mode()
    def __init__(
        self,
        draft: PreTrainedModel,
        prompt: list[int],
        limit: int,
        vocabulary: int,
        sampler: Sampler,
        latest: "list[DraftPredictions] | None" = None,
    ):
        """Take `vocabulary`: the target's size; ids that only one of the models has are never chosen.

        `latest`: at most one entry, the predictions of the problem whose text was read last, for the common beginning of the prompts. It is
        replaced by this object.
        """
        self.model, self.prompt = RowModel(draft, 1, limit, vocabulary), prompt
        self.vocabulary, self.sampler = vocabulary, sampler
        self.cached: list[int] = []
        self.latest = [] if latest is None else latest
        self.reader = PrefixReader(self.model) if self.model.facts.keeps_states else None
        if self.reader is None:
            reserve(self.model, limit)

    @torch.inference_mode()
    def __call__(self, response: list[int], start: int) -> list[int]:
        """Predict positions `start` … of `response`."""
        # The logits at `first` predict position `start`.
        text, first = self.prompt + response, len(self.prompt) + start - 1
        begin = self._go_to(text, first)
        out: list[int] = []
        for place in range(begin, len(text) - 1, CHUNK):
            piece = text[place : min(place + CHUNK, len(text) - 1)]
            self.model.rollback([place])
            logits = self.model.feed(torch.tensor([piece]), [len(piece)])[0]  # (≤ CHUNK, V)
            logits = logits[max(first - place, 0) :, : self.vocabulary].float()
            missing = self.vocabulary - logits.shape[-1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
            ends = range(place + len(piece) - logits.shape[0], place + len(piece))
            out += self.sampler([text[: end + 1] for end in ends], logits)
        self.cached, self.latest[:] = text[:-1], [self]
        return out

    def _go_to(self, text: list[int], first: int) -> int:
        """Prepare the model to continue `text`; return how many of its tokens, at most `first`, are cached."""
        if self.reader is not None:
            self.model = self.reader.read(text[:first], len(self.prompt)).copy()
            return first
        if not self.cached and self.latest and not self.model.reads_whole:
            self.cached = self.prompt[: count_shared(self.latest[0].cached, self.prompt)]
            self.model.cache.copy([0], self.latest[0].model.cache, [0], [len(self.cached)])
        return min(count_shared(self.cached, text), first)


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
        reserve(self.model, limit)

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
