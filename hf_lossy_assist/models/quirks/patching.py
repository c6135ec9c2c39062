"""Functions of Transformers that are replaced while a forward of this package runs, in modelling files and in modules of a model.

Both belong to all threads. The first forward replaces them, and the last one under way, in whatever thread, restores them. A replacement
asks whether the forward that calls it is one of ours (`current`), and does what the function did where it is not.
"""

import functools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch


class Patch(NamedTuple):
    """One attribute of a module or of a modelling file, and what it is while a forward runs that has this patch."""

    place: Any
    name: str
    # A function called as `by(forward, original, *args, **kwargs)`; or a plain value.
    by: Any

    @property
    def key(self) -> tuple[int, str]:
        """Tell the attribute from all others."""
        return id(self.place), self.name

    def replacement(self, original: Any) -> Any:
        """Return what stands in the place of `original`, in all threads."""
        if not callable(self.by):
            return self.by

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            forward = _current.get()
            if forward is None or self.key not in forward.patched:
                return original(*args, **kwargs)
            return self.by(forward, original, *args, **kwargs)

        return run


@dataclass(frozen=True)
class Forward:
    """One forward of this package, as the replaced functions see it."""

    # The `RowCache` that it runs on.
    cache: Any = None
    # Of its tokens, (1 or B, Q).
    positions: torch.Tensor | None = None
    # The call's `ChangingRope`, and the length of the text that gives each token its frequencies, (1 or B, Q).
    rope: Any = None
    rope_lengths: torch.Tensor | None = None
    # The `Layout` of a packed sequence.
    layout: Any = None
    # (B, n) of each row's tokens, where rows are padded on the left.
    columns: torch.Tensor | None = None
    # Keys of the patches that are in force.
    patched: frozenset[tuple[int, str]] = frozenset()


_current: ContextVar[Forward | None] = ContextVar("current", default=None)
_lock = threading.Lock()
_running: Counter[tuple[int, str]] = Counter()  # forwards under way in all threads, by the patches that they have
_originals: dict[tuple[int, str], Any] = {}
ABSENT = object()


def current() -> Forward | None:
    """Return the forward of this package that runs in this thread."""
    return _current.get()


@contextmanager
def running(forward: Forward, patches: Sequence[Patch] = ()) -> Iterator[None]:
    """Run one forward in this thread with these patches; within another it has that one's layout and patches, too."""
    outer = _current.get() or Forward()
    keys = outer.patched | {patch.key for patch in patches}
    forward = replace(forward, patched=keys, layout=forward.layout or outer.layout)
    token, counted = _current.set(forward), []
    # Around all that is to be undone: a stop from the keyboard may come between any two lines.
    try:
        with _lock:
            for patch in patches:
                _running[patch.key] += 1
                counted.append(patch)
                if patch.key not in _originals:
                    _replace(patch)
        yield
    finally:
        with _lock:
            for patch in counted:
                _running[patch.key] -= 1
                if not _running[patch.key]:
                    del _running[patch.key]
                    _restore(patch)
        _current.reset(token)


def _replace(patch: Patch) -> None:
    attributes = vars(patch.place)
    replacement = patch.replacement(getattr(patch.place, patch.name))
    # A method of the class stands in no module itself, unless somebody (accelerate, say) has put another one there.
    _originals[patch.key] = attributes.get(patch.name, ABSENT)
    attributes[patch.name] = replacement


def _restore(patch: Patch) -> None:
    original = _originals.pop(patch.key, None)
    if original is ABSENT:
        vars(patch.place).pop(patch.name, None)
    elif original is not None:
        vars(patch.place)[patch.name] = original
