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
    by: Any  # a function called as `by(forward, original, *args, **kwargs)`; or a plain value

    @property
    def key(self) -> tuple[int, str]:
        return id(self.place), self.name

    def replacement(self, original: Any) -> Any:
        """Return what replaces `original` in all threads."""
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

    cache: Any = None  # the `RowCache` that it runs on
    positions: torch.Tensor | None = None  # of its tokens, (1 or B, Q)
    rope_lengths: torch.Tensor | None = None  # of the text that gives each token its frequencies, (1 or B, Q)
    layout: Any = None  # of a packed sequence
    columns: torch.Tensor | None = None  # (B, n) of each row's tokens, where rows are padded on the left
    patched: frozenset[tuple[int, str]] = frozenset()  # keys of the patches that are in force


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
                    replacement = patch.replacement(getattr(patch.place, patch.name))
                    # A method of the class is in no module's dict, unless somebody (accelerate, say) has put another there.
                    _originals[patch.key] = vars(patch.place).get(patch.name, ABSENT)
                    vars(patch.place)[patch.name] = replacement
        yield
    finally:
        with _lock:
            for patch in counted:
                _running[patch.key] -= 1
                if not _running[patch.key]:
                    del _running[patch.key]
                    original = _originals.pop(patch.key, None)  # None: it could not be replaced
                    if original is ABSENT:
                        vars(patch.place).pop(patch.name, None)
                    elif original is not None:
                        vars(patch.place)[patch.name] = original
        _current.reset(token)
