"""Prefix cache: keys and values of the beginnings of prompts, reused by later prompts with the same beginning."""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from .introspection import adapters_of, base_of, weights_version
from .row_cache import States
from .row_model import RowModel


MOST = 8192  # tokens
WORTH_COPYING = 32  # tokens; no segment is shorter


@dataclass(eq=False)
class Segment:
    """A run of tokens that follows the tokens of `parent` in some prompts.

    Args:
        ids: the tokens. states: for each model, see `RowCache.part`. children: segments that follow, keyed by their
            first `WORTH_COPYING` tokens;
        used: time of the last use.
    """

    ids: list[int]
    states: list[States]
    parent: "Segment | None" = None
    children: dict[tuple[int, ...], "Segment"] = field(default_factory=dict)
    used: int = 0

    def below(self) -> "Iterator[Segment]":
        """Yield this segment and all its descendants."""
        yield self
        for child in self.children.values():
            yield from child.below()


def state_of(model: PreTrainedModel) -> Hashable:
    """Return what the keys of a text depend on in a model: itself, its active adapters, its weights."""
    return model, adapters_of(model), weights_version(base_of(model))


class PrefixCache:
    """A tree of segments for each set of models, adapters and weights: prompts share the storage of common tokens."""

    def __init__(self, most: int = MOST):
        """Take the number of tokens to store, `most`. The least recently used are evicted first;
        the latest prompt stays, whatever its length."""
        self.most, self.tokens, self.now = most, 0, 0
        self._roots: dict[Hashable, Segment] = {}

    def root(self, states: Sequence[Hashable]) -> Segment:
        """Return the root of the tree for models in these states, see `state_of`."""
        key = tuple(states)
        if key not in self._roots:  # each change of weights makes one
            self._roots = {other: root for other, root in self._roots.items() if root.children} | {
                key: Segment([], [])
            }
        return self._roots[key]

    def count(self, root: Segment, ids: Sequence[int]) -> int:
        """Return how many tokens of the beginning of a prompt are cached."""
        return sum(common for _, common in _path(root, ids[:-1]))

    def give(self, root: Segment, models: Sequence[RowModel], row: int, ids: Sequence[int]) -> None:
        """Copy the cached beginning of a prompt to an empty row of each model."""
        start = 0
        for segment, common in _path(root, ids[:-1]):
            for model, states in zip(models, segment.states, strict=True):
                model.put(row, start, states, common)
            start += common

    def keep(
        self, root: Segment, models: Sequence[RowModel], row: int, ids: Sequence[int], room: float = math.inf
    ) -> None:
        """Store the part of a prompt in each model's row that is not cached yet, except its last token.

        room: the total number of tokens that memory allows.
        """
        end = len(ids) - 1
        self.shrink(room - end + self.count(root, ids))
        path = _path(root, ids[:-1])
        start = sum(common for _, common in path)
        last, common = path[-1] if path else (root, 0)
        fits = self.tokens + end - start <= room and root in self._roots.values()
        if fits and end - start >= WORTH_COPYING and all(model.lengths[row] >= end for model in models):
            parent = last if common == len(last.ids) else self._split(last, common)
            last = Segment(list(ids[start:end]), [model.part(row, start, end) for model in models], parent)
            parent.children[_key(last.ids)] = last
            self.tokens += end - start
        self.now += 1
        while last.parent is not None:
            last.used, last = self.now, last.parent
        self.shrink(self.most, latest=False)

    def shrink(self, most: float, latest: bool = True) -> None:
        """Evict the least recently used segments until at most `most` tokens are left;
        `latest`: including the latest prompt."""
        while self.tokens > max(most, 0):
            segments = (segment for root in self._roots.values() for segment in root.below())
            leaves = [
                leaf for leaf in segments if not leaf.children and leaf.parent and (latest or leaf.used < self.now)
            ]
            if not leaves:
                return
            oldest = min(leaves, key=lambda segment: segment.used)
            assert oldest.parent is not None
            del oldest.parent.children[_key(oldest.ids)]
            self.tokens -= len(oldest.ids)

    def _split(self, segment: Segment, tokens: int) -> Segment:
        """Split a segment after its first `tokens`, and store the rest if it is long enough; return the first part."""
        parent, first, rest = segment.parent, segment.ids[:tokens], segment.ids[tokens:]
        assert parent is not None
        upper = Segment(first, [_cut(states, 0, tokens) for states in segment.states], parent, {}, segment.used)
        if len(rest) >= WORTH_COPYING:
            segment.states = [_cut(states, tokens, None) for states in segment.states]
            segment.ids, segment.parent, upper.children[_key(rest)] = rest, upper, segment
        else:
            self.tokens -= sum(len(below.ids) for below in segment.below()) - tokens
        parent.children[_key(first)] = upper  # last: if a copy runs out of memory, the tree is unchanged
        return upper


def _key(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(ids[:WORTH_COPYING])


def _cut(states: States, start: int, end: int | None) -> States:
    """Copy some tokens of each layer's states."""
    return [
        None if layer is None else (layer[0][:, :, start:end].clone(), layer[1][:, :, start:end].clone())
        for layer in states
    ]


def _path(root: Segment, ids: Sequence[int]) -> list[tuple[Segment, int]]:
    """Return the segments that `ids` begin with, and how many tokens they share with each."""
    path, segment, start = list[tuple[Segment, int]](), root, 0
    while (child := segment.children.get(tuple(ids[start : start + WORTH_COPYING]))) is not None:
        pairs, most = zip(child.ids, ids[start:], strict=False), min(len(child.ids), len(ids) - start)
        path.append((child, next((n for n, (a, b) in enumerate(pairs) if a != b), most)))
        if path[-1][1] < len(child.ids):
            break
        segment, start = child, start + len(child.ids)
    return path
