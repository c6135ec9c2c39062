"""Keys and values of what prompts begin with, kept for prompts that begin alike."""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from .introspection import adapters_of
from .row_cache import States
from .row_model import RowModel


MOST = 8192  # tokens
WORTH_COPYING = 32  # tokens; no segment has fewer


@dataclass(eq=False)
class Segment:
    """Tokens that follow those of `parent`, in some prompts.

    Args:
        ids: the tokens. states: of each model, as of `RowCache.part`. children: what follows, by the first `WORTH_COPYING` tokens; used: when last.
    """

    ids: list[int]
    states: list[States]
    parent: "Segment | None" = None
    children: dict[tuple[int, ...], "Segment"] = field(default_factory=dict)
    used: int = 0

    def below(self) -> "Iterator[Segment]":
        """Yield this segment and all that follow it."""
        yield self
        for child in self.children.values():
            yield from child.below()


class PrefixCache:
    """A tree of segments for each set of models and adapters: each token is kept once, whatever the number of prompts that share it."""

    def __init__(self, most: int = MOST):
        """`most`: tokens to keep; what was not used for the longest time goes first. The latest prompt stays, however long it is."""
        self.most, self.tokens, self.now = most, 0, 0
        self._roots: dict[Hashable, Segment] = {}

    def root(self, models: Sequence[RowModel]) -> Segment:
        """Return the root of what is kept for these models, with the adapters that take part in them now."""
        key = tuple((model.model, adapters_of(model.model)) for model in models)
        return self._roots.setdefault(key, Segment([], []))

    def count(self, root: Segment, ids: Sequence[int]) -> int:
        """Count the tokens that are known of the beginning of a prompt."""
        return sum(common for _, common in _path(root, ids[:-1]))

    def give(self, root: Segment, models: Sequence[RowModel], row: int, ids: Sequence[int]) -> None:
        """Copy to a row of each model, which holds nothing yet, what is known of its prompt's beginning."""
        start = 0
        for segment, common in _path(root, ids[:-1]):
            for model, states in zip(models, segment.states, strict=True):
                model.put(row, start, states, common)
            start += common

    def keep(
        self, root: Segment, models: Sequence[RowModel], row: int, ids: Sequence[int], room: float = math.inf
    ) -> None:
        """Keep what the row of each model holds of a prompt, all but its last token, beyond what is known.

        room: tokens in all for which there is memory.
        """
        end = len(ids) - 1
        self.shrink(room - end + self.count(root, ids))
        path = _path(root, ids[:-1])
        start = sum(common for _, common in path)
        last, common = path[-1] if path else (root, 0)
        fits = self.tokens + end - start <= room
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
        """Forget what was not used for the longest time, until there are no more than `most` tokens; `latest`: also of the latest prompt."""
        while self.tokens > max(most, 0):
            segments = (segment for root in self._roots.values() for segment in root.below())
            leaves = [
                each for each in segments if not each.children and each.parent and (latest or each.used < self.now)
            ]
            if not leaves:
                return
            oldest = min(leaves, key=lambda segment: segment.used)
            assert oldest.parent is not None
            del oldest.parent.children[_key(oldest.ids)]
            self.tokens -= len(oldest.ids)

    def _split(self, segment: Segment, tokens: int) -> Segment:
        """Make two segments of one, of which the first has `tokens`, and the second is kept if it is long enough; return the first."""
        parent, first, rest = segment.parent, segment.ids[:tokens], segment.ids[tokens:]
        assert parent is not None
        upper = Segment(first, [_cut(states, 0, tokens) for states in segment.states], parent, {}, segment.used)
        if len(rest) >= WORTH_COPYING:
            segment.states = [_cut(states, tokens, None) for states in segment.states]
            segment.ids, segment.parent, upper.children[_key(rest)] = rest, upper, segment
        else:
            self.tokens -= sum(len(each.ids) for each in segment.below()) - tokens
        parent.children[_key(first)] = upper  # last: where memory runs out in the copies, nothing has changed
        return upper


def _key(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(ids[:WORTH_COPYING])


def _cut(states: States, start: int, end: int | None) -> States:
    """Return some tokens of each layer's states, in storage of their own."""
    return [
        None if layer is None else (layer[0][:, :, start:end].clone(), layer[1][:, :, start:end].clone())
        for layer in states
    ]


def _path(root: Segment, ids: Sequence[int]) -> list[tuple[Segment, int]]:
    """Return the segments with which `ids` begin, and how many tokens they share with each."""
    path, segment, start = list[tuple[Segment, int]](), root, 0
    while (child := segment.children.get(tuple(ids[start : start + WORTH_COPYING]))) is not None:
        pairs, most = zip(child.ids, ids[start:], strict=False), min(len(child.ids), len(ids) - start)
        path.append((child, next((n for n, (a, b) in enumerate(pairs) if a != b), most)))
        if path[-1][1] < len(child.ids):
            break
        segment, start = child, start + len(child.ids)
    return path
