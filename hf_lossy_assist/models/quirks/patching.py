"""Functions of Transformers replaced by ours while a forward of ours runs: in modelling files, and in modules of a model.

Both belong to all threads. The first forward replaces them and the last one under way, in whatever thread, puts them back; a replacement
asks a `ContextVar` whether the forward that calls it is one of ours, and does what the function did where it is not.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class ScopedPatch:
    """One kind of replacement."""

    def __init__(self, ours: Callable[[Any], Mapping[str, Any]]):
        """`ours`: what a file or a module gets, by the names of the attributes."""
        self.ours = ours
        self._running: Counter[int] = (
            Counter()
        )  # forwards under way in all threads, by the `id` of what they have changed
        self._theirs: dict[int, dict[str, Any]] = {}  # what stood there itself meanwhile
        self._lock = threading.Lock()

    @contextmanager
    def within(self, places: Iterable[Any]) -> Iterator[None]:
        """A forward runs here for which these files or modules are changed."""
        counted = []
        try:  # around all that is to be undone: a stop from the keyboard may come between any two lines
            with self._lock:
                for place in places:
                    self._running[id(place)] += 1
                    counted.append(place)
                    if id(place) not in self._theirs:
                        self._replace(place)
            yield
        finally:
            with self._lock:
                for place in counted:
                    self._running[id(place)] -= 1
                    if not self._running[id(place)]:
                        del self._running[id(place)]
                        self._put_back(place)

    def _replace(self, place: Any) -> None:
        ours, own = self.ours(place), vars(place)
        # A method of the class stands in no module itself, unless somebody (accelerate, say) has put another one there.
        self._theirs[id(place)] = {name: own.get(name, ABSENT) for name in ours}
        own.update(ours)

    def _put_back(self, place: Any) -> None:
        for name, its in self._theirs.pop(id(place), {}).items():
            if its is ABSENT:
                vars(place).pop(name, None)
            else:
                vars(place)[name] = its


ABSENT = object()
