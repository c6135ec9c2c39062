"""One text read from beginning to end: what a search needs of a model whose recurrent state cannot go back.

A search's texts have more and more in common: each begins with all that the last one had in front of its change. So a row that has read
that much and nothing behind it serves them all, and what follows is read by copies of it.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from ...artifacts.features import FeatureTap
from ...models.probe import why_not_prefixes, why_not_rows
from ...models.recurrent.layers import keeps_states
from ...models.row_model import RowModel


class Reader:
    """One row, and the text that it holds."""

    def __init__(self, model: RowModel):
        """`model`: of one row that holds nothing."""
        self.first, self.model = model, model
        self.held: list[int] = []

    def read(self, text: list[int], prompt: int) -> RowModel:
        """The row once it holds `text`, of which the first `prompt` tokens are the prompt's. What it is fed from then on is not in `text`.

        Read anew where `text` does not begin with what the row holds.
        """
        for _ in self._parts(text, prompt):
            pass
        return self.model

    def states(self, text: list[int], prompt: int, tap: FeatureTap) -> torch.Tensor:
        """`read`, and the states (n, H) that `tap` takes of the n tokens, one or more, that the row did not hold."""
        return torch.cat([tap.latest[0] for _ in self._parts(text, prompt)])

    def _parts(self, text: list[int], prompt: int) -> Iterator[None]:
        """Read `text`; stops behind each forward."""
        if not self.held or self.held != text[: len(self.held)]:
            self.model, self.held = self.first.anew(self.first.cache.limit), []
        begun = len(self.held)
        # A prompt's last token is read as those behind it are, as in decoding.
        for part, keep in ((text[begun : prompt - 1], 0), (text[max(begun, prompt - 1) :], 1)):
            if part:
                self.model.feed(torch.tensor([part]), [len(part)], keep=keep)
                yield
        self.model.rollback([len(text)])
        self.held = list(text)


def why_not_searched(model: Any) -> str | None:
    """Why a search cannot have this model read its texts, or None if it can."""
    return why_not_rows(model) if keeps_states(model) else why_not_prefixes(model)


def states_along(
    model: Any, tap: FeatureTap, prompt: int, text: list[int], others: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """The states of a text's tokens and, behind them, of `others`: (token, place) that stand in the place of the text's own token there.

    Read one behind the other, which is for models whose tokens cannot be shown different texts by a mask. `prompt`: how many of the text's
    tokens are its prompt's. Returns: (tokens, H), of what `tap` takes.
    """
    largest = max([*text, *(token for token, _ in others)])  # a draft's vocabulary may be smaller
    reader, of_text = Reader(RowModel(model, 1, len(text), largest + 1)), list[torch.Tensor]()
    of_others: dict[int, torch.Tensor] = {}
    for place, numbers in groupby(sorted(range(len(others)), key=lambda i: others[i][1]), lambda i: others[i][1]):
        of_text.append(reader.states(text[:place], prompt, tap))
        for number in numbers:
            alone = reader.model.copy()
            alone.feed(torch.tensor([[others[number][0]]]), [1])
            of_others[number] = tap.latest[0]
    of_text.append(reader.states(text, prompt, tap))
    return torch.cat([*of_text, *(of_others[i] for i in range(len(others)))])
