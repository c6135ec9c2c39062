"""A stand-in for the library `datasets`: hands out rows of the test's own and remembers what it was asked for."""

import sys
import types


def fake_datasets(monkeypatch, rows=(), error=None):
    """Put it in the place of the library; returns the list of what `load_dataset` was called with."""
    asked = []

    def load_dataset(*names, **settings):
        asked.append((names, settings))
        if error is not None:
            raise error
        return list(rows)

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def no_datasets(monkeypatch):
    """As if the library were not installed."""
    monkeypatch.setitem(sys.modules, "datasets", None)
