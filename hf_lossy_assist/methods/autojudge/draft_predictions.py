"""Predict the draft's tokens along a response; a search tries the positions where they differ from it."""

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from ...artifacts.features import FeatureTap
from ...drafters.hidden_state import HiddenStateDrafter
from ...models.row_model import RowModel
from .generation_backend import Sampler


CHUNK = 256  # positions whose logits are computed together: 150 MB for a vocabulary of 150 000
Predict = Callable[[list[int], int], list[int]]  # the draft's tokens for positions `start` … of a response


def count_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of two texts' common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class PrefixReader:
    """One row of a model, and the text that it holds: copies of the row read what follows.

    A recurrent state, unlike a cache of keys and values, cannot be rolled back to the beginning that two texts share.
    """

    def __init__(self, model: RowModel):
        """`model`: of one empty row."""
        self.empty, self.model = model, model
        self.text: list[int] = []

    def read(self, text: list[int], prompt: int) -> RowModel:
        """Return the row after it has read `text`, the first `prompt` tokens being the prompt's. Feed a copy, not the row itself.

        It starts again from the empty row if `text` does not begin with what it holds.
        """
        for _ in self._feed(text, prompt):
            pass
        return self.model

    def read_states(self, text: list[int], prompt: int, tap: FeatureTap) -> torch.Tensor:
        """Read `text`; return the states (n, H) recorded by `tap` of the n ≥ 1 tokens that the row did not hold."""
        return torch.cat([tap.latest[0] for _ in self._feed(text, prompt)])

    def _feed(self, text: list[int], prompt: int) -> Iterator[None]:
        """Read `text`; yield after each forward."""
        if self.text != text[: len(self.text)]:
            self.model, self.text = self.empty.fresh(1, self.empty.cache.limit), []
        begun = len(self.text)
        # A prompt's last token is read with those after it, as in decoding.
        for tokens, keep in ((text[begun : prompt - 1], 0), (text[max(begun, prompt - 1) :], 1)):
            if tokens:
                self.model.feed(torch.tensor([tokens]), [len(tokens)], keep=keep)
                yield
        self.model.rollback([len(text)])
        self.text = list(text)


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
        for begin in range(first, len(text) - 1, CHUNK):
            piece = text[begin : min(begin + CHUNK, len(text) - 1)]
            model.rollback([begin])
            logits = model.feed(torch.tensor([piece]), [len(piece)])[0][:, : self.vocabulary].float()  # (≤ CHUNK, V)
            missing = self.vocabulary - logits.shape[-1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
            out += self.sampler([text[: end + 1] for end in range(begin, begin + len(piece))], logits)
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
        blocks = [] if self.states is None else [self.states[:, :shared]]
        for start in range(shared, len(text), CHUNK):
            piece = text[start : start + CHUNK]
            with self.reader:
                self.model.feed(torch.tensor([piece]), [len(piece)], keep=0)
                states = self.reader.take_states()
            assert states is not None, "the target has just run"
            blocks.append(states)
        self.states, self.cached = torch.cat(blocks, dim=1), list(text)
        return self.states
