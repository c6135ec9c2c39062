"""Proves that rows of different lengths share one cache: any feeds and rollbacks give the logits of each row's text run alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from transformers import DynamicCache

from hf_lossy_assist.models import row_cache as cache_module
from hf_lossy_assist.models.facts import CACHE
from hf_lossy_assist.models.row_cache import RowCache
from hf_lossy_assist.models.row_model import RowModel, visibility


ROWS, LIMIT = 3, 64


def alone(model, text: list[int]) -> torch.Tensor:
    """Logits (length, V) of one text from scratch, on Transformers' own cache."""
    with torch.no_grad():
        return model(torch.tensor([text]), **{CACHE: DynamicCache(config=model.config)}).logits[0]


class Mirror:
    """A `RowModel` and, beside it, the plain texts that it should hold."""

    def __init__(self, model, rows: int = ROWS):
        self.model, self.rows = model, RowModel(model, rows, LIMIT)
        self.texts: list[list[int]] = [[] for _ in range(rows)]

    @torch.no_grad()
    def feed(self, tokens: torch.Tensor, counts: list[int]) -> None:
        """Row b takes its first `counts[b]` tokens; what stands behind them is padding and must not matter."""
        logits = self.rows.feed(tokens, counts)
        for b, count in enumerate(counts):
            self.texts[b] += tokens[b, :count].tolist()
            if count:
                expected = alone(self.model, self.texts[b])[-count:]
                torch.testing.assert_close(logits[b, :count], expected, atol=1e-4, rtol=1e-4)
        assert self.rows.lengths == [len(text) for text in self.texts]

    def rollback(self, lengths: list[int]) -> None:
        self.rows.rollback(lengths)
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]

    def select(self, keep: list[int]) -> None:
        self.rows.select(keep)
        self.texts = [self.texts[b] for b in keep]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama", "gemma2"))]
)
@settings(max_examples=30)
@given(data=st.data())
def test_any_feeds_and_rollbacks(name, data):
    """Also behind sliding windows (of 8 tokens, the texts are longer) and after rows were taken out or reordered."""
    mirror = Mirror(tiny.shared(name))
    for _ in range(data.draw(st.integers(1, 6), "rounds")):
        batch, width = len(mirror.texts), data.draw(st.integers(1, 9), "width")
        counts = data.draw(st.lists(st.integers(0, width), min_size=batch, max_size=batch), "counts")
        tokens = torch.randint(1, tiny.VOCABULARY, (batch, width))
        mirror.feed(tokens, counts)
        mirror.rollback([data.draw(st.integers(max(0, len(t) - 7), len(t)), "length") for t in mirror.texts])
        if data.draw(st.integers(0, 4)) == 0:
            order = data.draw(st.permutations(range(batch)), "order")
            mirror.select(order[: max(1, batch - 1)])


def test_storage_grows(monkeypatch):
    """Capacity grows by doubling or by STEP, whichever is more, never far beyond the limit; what was written stays."""
    monkeypatch.setattr(cache_module, "STEP", 4)
    mirror, seen = Mirror(tiny.shared("llama")), []
    for width in (3, 1, 5, 2, 9, 9, 9, 9):
        mirror.feed(torch.randint(1, tiny.VOCABULARY, (ROWS, width)), [width, max(width - 1, 1), 1])
        seen.append(mirror.rows.cache.capacity)
        layer = mirror.rows.cache.layers[0]
        assert layer.keys.shape[2] == layer.values.shape[2] == seen[-1]
        assert max(mirror.rows.lengths) <= seen[-1] <= LIMIT + width
    # 3 + 4 = 7; 4 fit; 9 need 2 · 7 = 14; 11 fit; 20 need 28; 29 need 56; 38 fit; 47 fit.
    assert seen == [7, 7, 14, 14, 28, 56, 56, 56]


def test_plan_by_hand():
    """Rows at 2 and 5 tokens, three more each: slots 2–4 and 5–7, eight slots visible. Equal rows need no index at all."""
    cache = RowCache(layers=1, limit=20)
    positions = cache.plan([2, 5], 3, torch.device("cpu"))
    assert positions.tolist() == [[2, 3, 4], [5, 6, 7]] and (cache.start, cache.visible) == (2, 8)
    assert cache.get_seq_length() == 2 and cache.get_mask_sizes(3, 0) == (8, 0)
    assert cache.plan([4, 4], 2, torch.device("cpu")).tolist() == [[4, 5]]
    assert cache.slots is None and (cache.start, cache.visible) == (4, 6)


def test_visibility_by_hand():
    """A query at position 3 of 6 slots: all up to itself; in a window of 2, slots 2 and 3; in chunks of 3, slot 3 alone."""
    at = torch.tensor([[3]])
    assert visibility(at, 6, None, None)[0, 0, 0].tolist() == [True, True, True, True, False, False]
    assert visibility(at, 6, 2, None)[0, 0, 0].tolist() == [False, False, True, True, False, False]
    assert visibility(at, 6, None, 3)[0, 0, 0].tolist() == [False, False, False, True, False, False]
    assert visibility(torch.tensor([[0, 1], [4, 5]]), 6, None, None).shape == (2, 1, 2, 6)


def test_select_takes_rows_in_order():
    mirror = Mirror(tiny.shared("llama"))
    mirror.feed(torch.randint(1, tiny.VOCABULARY, (ROWS, 8)), [8, 3, 5])
    mirror.select([2, 0])
    assert mirror.rows.lengths == [5, 8] and mirror.rows.cache.layers[0].keys.shape[0] == 2
    mirror.feed(torch.randint(1, tiny.VOCABULARY, (2, 4)), [4, 1])
    RowModel(tiny.shared("llama"), 2, LIMIT).select([1])  # before anything was written
