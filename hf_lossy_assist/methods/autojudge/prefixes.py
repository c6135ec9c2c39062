"""Reuse of the prefix in a search, whose texts have more and more in common: copies of its row read the rest of each.

A recurrent state, unlike a cache of keys and values, cannot be rolled back to the prefix.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from transformers import PreTrainedModel

from ...artifacts.features import FeatureTap
from ...models.row_model import RowModel


def count_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of two texts' common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class PrefixReader:
    """One row of a model, and the text that it holds."""

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
        for part, keep in ((text[begun : prompt - 1], 0), (text[max(begun, prompt - 1) :], 1)):
            if part:
                self.model.feed(torch.tensor([part]), [len(part)], keep=keep)
                yield
        self.model.rollback([len(text)])
        self.text = list(text)


def read_states_along(
    model: PreTrainedModel, tap: FeatureTap, prompt: int, text: list[int], others: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return the states (tokens, H) recorded by `tap` for a text followed by the `others`, reading tokens in sequence.

    For models in which a mask cannot give tokens different contexts. `others`: (token, position) pairs that replace the text's token there.
    """
    largest = max([*text, *(token for token, _ in others)])  # may exceed a draft's vocabulary
    reader, of_text = PrefixReader(RowModel(model, 1, len(text), largest + 1)), list[torch.Tensor]()
    of_others: dict[int, torch.Tensor] = {}
    for place, numbers in groupby(sorted(range(len(others)), key=lambda i: others[i][1]), lambda i: others[i][1]):
        of_text.append(reader.read_states(text[:place], prompt, tap))
        for number in numbers:
            alone = reader.model.copy()
            alone.feed(torch.tensor([[others[number][0]]]), [1])
            of_others[number] = tap.latest[0]
    of_text.append(reader.read_states(text, prompt, tap))
    return torch.cat([*of_text, *(of_others[i] for i in range(len(others)))])
