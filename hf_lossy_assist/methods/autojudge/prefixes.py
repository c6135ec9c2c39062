"""Read texts that begin alike once: a search's texts have more and more in common.

A cache goes back to what two texts share. A recurrent state cannot: there a row that has read that much and nothing more serves all texts,
and copies of it read what follows.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from transformers import PreTrainedModel

from ...artifacts.features import FeatureTap
from ...models.probe import why_not_prefixes, why_not_rows
from ...models.recurrent.layers import keeps_states
from ...models.row_cache import SPARE
from ...models.row_model import RowModel


def count_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the tokens that two texts share at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@torch.inference_mode()
def reserve(model: RowModel, limit: int) -> None:
    """Allocate the storage of `limit` tokens at once, so that rows can be copied and shared."""
    rows = len(model.lengths)
    model.reserve(limit + SPARE)
    model.feed(torch.zeros(rows, 1, dtype=torch.int64), [0] * rows, keep=0)


def why_not_searched(model: PreTrainedModel) -> str | None:
    """Return why a search cannot have this model read its texts, or None if it can."""
    return why_not_rows(model) if keeps_states(model) else why_not_prefixes(model)


class PrefixReader:
    """One row of a model with a recurrent state, and the text that it holds."""

    def __init__(self, model: RowModel):
        """`model`: of one row that holds nothing."""
        self.empty, self.model = model, model
        self.text: list[int] = []

    def read(self, text: list[int], prompt: int) -> RowModel:
        """Return the row once it holds `text`, of which `prompt` tokens are the prompt's. Feed nothing to it, but to a copy.

        It reads anew where `text` does not begin with what it holds.
        """
        for _ in self._feed(text, prompt):
            pass
        return self.model

    def read_states(self, text: list[int], prompt: int, tap: FeatureTap) -> torch.Tensor:
        """Read `text`; return the states (n, H) that `tap` takes of the n ≥ 1 tokens that the row did not hold."""
        return torch.cat([tap.latest[0] for _ in self._feed(text, prompt)])

    def _feed(self, text: list[int], prompt: int) -> Iterator[None]:
        """Read `text`; yield after each forward."""
        if not self.text or self.text != text[: len(self.text)]:
            self.model, self.text = self.empty.fresh(1, self.empty.cache.limit), []
        begun = len(self.text)
        # A prompt's last token is read as those after it are, as in decoding.
        for part, keep in ((text[begun : prompt - 1], 0), (text[max(begun, prompt - 1) :], 1)):
            if part:
                self.model.feed(torch.tensor([part]), [len(part)], keep=keep)
                yield
        self.model.rollback([len(text)])
        self.text = list(text)


def read_states_along(
    model: PreTrainedModel, tap: FeatureTap, prompt: int, text: list[int], others: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return the states (tokens, H) that `tap` takes of a text and, after it, of the `others`, reading one after the other.

    For models whose tokens cannot be shown different texts by a mask. `others`: (token, place) in the place of the text's token there.
    """
    largest = max([*text, *(token for token, _ in others)])  # a draft's vocabulary may be smaller
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
