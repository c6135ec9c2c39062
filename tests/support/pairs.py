"""Rows of a matrix in which each pair of values of two axes stands together once."""

import itertools
from collections.abc import Callable, Iterator, Sequence


Row = dict[str, str]


def _pairs(row: Row) -> Iterator[frozenset[tuple[str, str]]]:
    return map(frozenset, itertools.combinations(row.items(), 2))


def cover_pairs(axes: dict[str, Sequence[str]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Return rows that hold every pair of values that some row can hold; the first hold the most.

    `allowed` judges a row of which some axes may still be missing.
    """
    pairs = itertools.combinations(axes, 2)
    missing = {
        frozenset({(one, a), (other, b)}): None
        for one, other in pairs
        for a, b in itertools.product(axes[one], axes[other])
        if allowed({one: a, other: b})
    }
    rows = []
    while missing:
        row = _complete(dict(next(iter(missing))), axes, missing, allowed)
        if row is None:  # no row can hold this pair
            del missing[next(iter(missing))]
            continue
        for pair in _pairs(row):
            missing.pop(pair, None)
        rows.append({axis: row[axis] for axis in axes})
    return rows


def _complete(row: Row, axes: dict[str, Sequence[str]], missing: dict, allowed: Callable[[Row], bool]) -> Row | None:
    """Choose for each further axis the value that brings the most missing pairs, and go back where none is allowed."""
    rest = [axis for axis in axes if axis not in row]
    if not rest:
        return row
    choices = [row | {rest[0]: value} for value in axes[rest[0]]]
    choices.sort(key=lambda chosen: -sum(pair in missing for pair in _pairs(chosen)))
    found = (_complete(chosen, axes, missing, allowed) for chosen in choices if allowed(chosen))
    return next((chosen for chosen in found if chosen is not None), None)
