"""Shortcuts over a vocabulary give what the plain operations give: ties, holes, odd sizes, and parts of any size."""

import math

import pytest
import torch

from hf_lossy_assist import tensors
from hf_lossy_assist.tensors import GROUP, argmax, at_places, in_parts, passing


SIZES = (1, 5, GROUP, 2 * GROUP, 2 * GROUP + 1, 5 * GROUP - 1, 9 * GROUP + 44)


def values(size: int, seed: int = 0, step: float | None = None) -> torch.Tensor:
    """(3, 4, size) random numbers; with `step` rounded to multiples of it, so that many are equal."""
    x = torch.randn(3, 4, size, generator=torch.Generator().manual_seed(seed))
    return x if step is None else (x / step).round() * step


@pytest.mark.parametrize("size", SIZES)
def test_the_first_of_the_largest(size):
    for seed in range(20):
        for step in (None, 0.5):  # distinct values, and many that are equal
            x = values(size, seed, step)
            assert torch.equal(argmax(x), x.argmax(dim=-1))
            assert torch.equal(argmax(x[:, 1:3]), x[:, 1:3].argmax(dim=-1))  # a slice, not contiguous
    x = torch.zeros(3, 4, size)
    assert not argmax(x).any() and not argmax(x - math.inf).any()
    for place in {0, size // 2, size - 1}:
        for best in (math.nan, math.inf, 1.0):
            x = torch.zeros(2, size)
            x[0, place:], x[1, place] = best, best
            assert argmax(x).tolist() == [place, place] == x.argmax(dim=-1).tolist()


@pytest.mark.parametrize("part", [1, 100, 1 << 20])
def test_parts_are_the_whole(part, monkeypatch):
    monkeypatch.setattr(tensors, "PART", part)
    seen = []

    def spread(x: torch.Tensor, bar: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x.softmax(dim=-1).amax(dim=-1) + bar

    x, bar = torch.randn(5, 3, 11), torch.randn(5, 3)
    assert torch.equal(in_parts(spread, x, bar), spread(x, bar))
    assert sum(seen[:-1]) == 5 and (len(seen) == 2) == (part == 1 << 20)
    assert in_parts(spread, x[:0], bar[:0]).shape == (0, 3)
    monkeypatch.setattr(tensors, "PART", 1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    seen: list[int] = []
    in_parts(lambda x: seen.append(len(x)) or x, torch.randn(5, 3))
    assert seen == [5]


def test_one_place_of_each_row():
    x = torch.randn(4, 3, 6)
    for places in ([0, 1, 2, 0], [2, 2, 2, 2]):
        assert torch.equal(at_places(x, torch.tensor(places)), x[range(4), places])
        assert torch.equal(at_places(x[:, :, ::2], torch.tensor(places)), x[range(4), places, ::2])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = values(300, step=0.25).to(dtype)
        bar = x[..., 5:6]
        for compare in (torch.lt, torch.gt, torch.eq, torch.ge):
            found = passing(compare, x, bar)
            assert found.dtype == torch.float32 and torch.equal(found.bool(), compare(x, bar))
            assert torch.equal(found.sum(-1).long(), compare(x, bar).sum(-1))
