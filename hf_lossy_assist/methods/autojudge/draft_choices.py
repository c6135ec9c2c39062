"""What the draft would choose along a response: the mismatches that a search tries are where it differs."""

from typing import Any

import torch

from ...drafters.hidden_state import HiddenStateDrafter
from ...models.row_model import RowModel
from .continuing import Choice, in_common, make_room
from .reading import Reader


CHUNK = 256  # positions whose logits are looked at together: of a vocabulary of 150 000, 150 MB


class DraftChoices:
    """The draft's own choices along a response, each after the response's own prefix: one forward over what is new in it."""

    @torch.inference_mode()
    def __init__(
        self,
        draft: Any,
        prompt: list[int],
        limit: int,
        vocabulary: int,
        choice: Choice,
        read: "list[DraftChoices] | None" = None,
    ):
        """`vocabulary`: the target's; ids that only one of the models has are never chosen. `read`: the one of another problem that has read its
        prompt last, if one has, as this one does it; prompts may begin alike.
        """
        self.model, self.prompt = RowModel(draft, 1, limit, vocabulary), prompt
        self.vocabulary, self.choice = vocabulary, choice
        self.cached: list[int] = []
        self.read = [] if read is None else read
        self.reader = Reader(self.model) if self.model.facts.keeps_states else None
        if self.reader is None:
            make_room(self.model, limit)

    @torch.inference_mode()
    def __call__(self, response: list[int], start: int) -> list[int]:
        """Choices for positions `start` … of `response`."""
        text, first = self.prompt + response, len(self.prompt) + start - 1  # logits at `first` choose position `start`
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
            out += self.choice([text[: end + 1] for end in ends], logits, "draft")
        self.cached, self.read[:] = text[:-1], [self]
        return out

    def _go_to(self, text: list[int], first: int) -> int:
        """How many tokens of `text`, no more than `first`, the model can go on behind."""
        if self.reader is not None:
            self.model = self.reader.read(text[:first], len(self.prompt)).copy()
            return first
        if not self.cached and self.read and self.model.rope is None:
            self.cached = self.prompt[: in_common(self.read[0].cached, self.prompt)]
            self.model.cache.copy(0, self.read[0].model.cache, 0, len(self.cached))
        return min(in_common(self.cached, text), first)


class StatesChoices:
    """The same of a drafter on the target's states, in drafts of `places` tokens one behind the other, each behind the response's own tokens.

    What is new in a response the target reads in a forward of its own, for the search has the states of no text as it stands in the end.
    """

    @torch.inference_mode()
    def __init__(
        self, drafter: HiddenStateDrafter, target: Any, prompt: list[int], limit: int, choice: Choice, places: int
    ):
        self.drafter, self.target, self.prompt, self.choice, self.places = drafter, target, prompt, choice, places
        self.reader, self.model = drafter.hook(target), RowModel(target, 1, limit)
        self.cached: list[int] = []
        self.states: torch.Tensor | None = None  # of the tokens in `cached`, (1, n, layers · H)
        make_room(self.model, limit)

    @torch.inference_mode()
    def __call__(self, response: list[int], start: int) -> list[int]:
        """Return the drafter's choice at each token of `response` from `start` on. After a text of one token it has none, and the response's token stands there."""
        text, first = self.prompt + response, len(self.prompt) + start  # of the tokens to be chosen
        own = response[start : start + max(2 - first, 0)]
        first = max(first, 2)
        if first >= len(text):
            return own
        self._read(text[:-2])
        assert self.states is not None
        logits = self.drafter.logits_along(
            self.target, torch.tensor(text[:-1]), self.states[0], len(text) - first, self.places
        )
        return own + self.choice([text[:end] for end in range(first, len(text))], logits.float(), "draft")

    def _read(self, text: list[int]) -> None:
        """Have the target's states of `text`, of which only what differs from the text before is read."""
        held = in_common(self.cached, text)
        self.model.rollback([held])
        parts = [] if self.states is None else [self.states[:, :held]]
        for place in range(held, len(text), CHUNK):
            piece = text[place : place + CHUNK]
            with self.reader:
                self.model.feed(torch.tensor([piece]), [len(piece)], keep=0)
                states = self.reader.take()
            assert states is not None, "the target has just run"
            parts.append(states)
        self.states, self.cached = torch.cat(parts, dim=1), list(text)
