"""What the draft would choose along a response: the mismatches that a search tries are where it differs."""

from typing import Any

import torch

from ...models.row_model import RowModel
from .continuing import Choice, in_common, make_room


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
        make_room(self.model, limit)

    @torch.inference_mode()
    def __call__(self, response: list[int], start: int) -> list[int]:
        """Choices for positions `start` … of `response`."""
        if not self.cached and self.read and self.model.rope is None:
            self.cached = self.prompt[: in_common(self.read[0].cached, self.prompt)]
            self.model.cache.copy(0, self.read[0].model.cache, 0, len(self.cached))
        text, first = self.prompt + response, len(self.prompt) + start - 1  # logits at `first` choose position `start`
        begin = min(in_common(self.cached, text), first)
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
