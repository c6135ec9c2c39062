"""What registers is read when a name is first looked up: this package's own rooms, and the entry points of others."""

import importlib
import pkgutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from ..validation import one_line
from .entry import KINDS, Entry, Kind


PACKAGE = __name__.split(".")[0]
PLUGINS = "hf_lossy_assist"  # the group of entry points that register more
ROOMS = (
    "rules",
    "stops",
    "filters",
    "drafters",
    "policy.methods",
)  # every file of these is read for what it registers

ENTRIES: dict[Kind, dict[str, Entry]] = {kind: {} for kind in KINDS}  # by kind and name
_loaded: set[str] = set()
_reading = threading.local()  # .now: this thread is importing what registers


def of_a_room_being_read(make: Any) -> bool:
    """Whether a file of this package registers it, in its last lines: to read all rooms then would be to read it within itself."""
    name = str(getattr(make, "__module__", ""))
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name.startswith(f"{PACKAGE}.") and getattr(spec, "_initializing", False)


def load() -> None:
    """Import what registers: this package's own rooms, and the entry points of others. Once, and when a name is first looked up:
    an entry stands above this file in the layers. What could not be imported is tried again at the next look-up.

    Raises: `ImportError`, one line, for an entry point that cannot be loaded.
    """
    load_rooms()
    if PLUGINS in _loaded or getattr(_reading, "now", False):
        return
    for point in entry_points(group=PLUGINS):
        try:
            with _reading_on():
                point.load()
        except (Exception, SystemExit) as error:
            raise ImportError(
                f"the entry point {point.name} = {point.value} of the group {PLUGINS!r} cannot be loaded: "
                f"{type(error).__name__}: {one_line(error)}; mend its package, or uninstall that"
            ) from error
    _loaded.add(PLUGINS)


def load_rooms() -> None:
    """The first half of `load`: each file of this package's own rooms. Nothing where it is called while such a file is imported."""
    if getattr(_reading, "now", False):
        return
    for room in ROOMS:
        if room not in _loaded:
            with _reading_on():
                made = importlib.import_module(f"{PACKAGE}.{room}")
                for file in pkgutil.iter_modules(getattr(made, "__path__", ())):
                    importlib.import_module(f"{made.__name__}.{file.name}")
            _loaded.add(room)


@contextmanager
def _reading_on() -> Iterator[None]:
    """Import in here. Where that fails, names go that came with a module which Python took back: it will register them once more."""
    before = {kind: set(names) for kind, names in ENTRIES.items()}
    _reading.now = True
    try:
        yield
    except BaseException:
        for kind, names in ENTRIES.items():
            for name in set(names) - before[kind]:
                if names[name].make.__module__ not in sys.modules:
                    del names[name]
        raise
    finally:
        _reading.now = False
