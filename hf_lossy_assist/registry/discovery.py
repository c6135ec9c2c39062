"""Import the modules that register names, of this package and of entry points, at the first look-up."""

import importlib
import pkgutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, Literal

from ..validation import one_line


Kind = Literal["method", "rule", "stop", "filter", "drafter"]
KINDS: tuple[Kind, ...] = ("method", "rule", "stop", "filter", "drafter")
PACKAGE = __name__.split(".")[0]
PLUGINS = "hf_lossy_assist"  # entry point group of plugins
BUILTIN = ("rules", "stops", "filters", "drafters", "policy.recipes")  # all their modules are imported

ENTRIES: dict[Kind, dict[str, Any]] = {kind: {} for kind in KINDS}  # `registry.Entry` by kind and name
LOADED: set[str] = set()  # rooms, and `PLUGINS`, whose modules are imported
_state = threading.local()  # .now: this thread is importing registering modules


def is_initialising(make: object) -> bool:
    """Return whether the module that defines `make` is still being imported, when importing all modules would be circular."""
    name = str(getattr(make, "__module__", ""))
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name.startswith(f"{PACKAGE}.") and getattr(spec, "_initializing", False)


def import_entries() -> None:
    """Import all registering modules once; a failed import is retried. Raises: `ImportError`, one line, for a failing entry point."""
    import_builtin_entries()
    if PLUGINS in LOADED or getattr(_state, "now", False):
        return
    for point in entry_points(group=PLUGINS):
        try:
            with _collecting():
                point.load()
        except (Exception, SystemExit) as error:
            raise ImportError(
                f"the entry point {point.name} = {point.value} of the group {PLUGINS!r} cannot be loaded: "
                f"{type(error).__name__}: {one_line(error)}; mend its package, or uninstall that"
            ) from error
    LOADED.add(PLUGINS)


def import_builtin_entries() -> None:
    """Import this package's registering modules; do nothing during such an import."""
    if getattr(_state, "now", False):
        return
    for room in BUILTIN:
        if room not in LOADED:
            with _collecting():
                module = importlib.import_module(f"{PACKAGE}.{room}")
                for file in pkgutil.iter_modules(getattr(module, "__path__", ())):
                    importlib.import_module(f"{module.__name__}.{file.name}")
            LOADED.add(room)


@contextmanager
def _collecting() -> Iterator[None]:
    """Mark this thread as importing. If the import fails, unregister names of modules that Python removed, so that a retry can register them."""
    before = {kind: set(names) for kind, names in ENTRIES.items()}
    _state.now = True
    try:
        yield
    except BaseException:
        for kind, names in ENTRIES.items():
            for name in set(names) - before[kind]:
                if names[name].make.__module__ not in sys.modules:
                    del names[name]
        raise
    finally:
        _state.now = False
