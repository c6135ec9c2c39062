"""Import what registers, when a name is first looked up: the modules of this package and the entry points of others."""

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
PLUGINS = "hf_lossy_assist"  # the group of entry points that register more
BUILTIN = ("rules", "stops", "filters", "drafters", "policy.recipes")  # whose files are all imported

ENTRIES: dict[Kind, dict[str, Any]] = {kind: {} for kind in KINDS}  # `registry.Entry` by kind and name
_loaded: set[str] = set()
_state = threading.local()  # .now: this thread is importing what registers


def is_initialising(make: object) -> bool:
    """Return whether the module that defines `make` is still being imported: importing all modules then would import it within itself."""
    name = str(getattr(make, "__module__", ""))
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name.startswith(f"{PACKAGE}.") and getattr(spec, "_initializing", False)


def import_entries() -> None:
    """Import what registers, once; a failed import is tried again. Raises: `ImportError`, one line, for an entry point that fails."""
    import_builtin_entries()
    if PLUGINS in _loaded or getattr(_state, "now", False):
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
    _loaded.add(PLUGINS)


def import_builtin_entries() -> None:
    """Import every module of this package that registers; do nothing during such an import."""
    if getattr(_state, "now", False):
        return
    for room in BUILTIN:
        if room not in _loaded:
            with _collecting():
                made = importlib.import_module(f"{PACKAGE}.{room}")
                for file in pkgutil.iter_modules(getattr(made, "__path__", ())):
                    importlib.import_module(f"{made.__name__}.{file.name}")
            _loaded.add(room)


@contextmanager
def _collecting() -> Iterator[None]:
    """Import inside this context. If the import fails, unregister the names of modules that Python removed, so that a retry can register them."""
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
