"""Files of problems, a stand-in for the library `datasets`, and calls from other threads."""

import json
import sys
import threading
import types

from hf_lossy_assist.tasks.load import Problem


ANY = Problem("?")


def rows(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def in_thread(call):
    """Return the result of `call` in another thread than the main one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(60)
    return found[0]


def fake_datasets(monkeypatch, rows=(), error=None):
    """Put it in the place of the library; returns the list of what `load_dataset` was called with."""
    calls = []

    def load_dataset(*names, **settings):
        calls.append((names, settings))
        if error is not None:
            raise error
        return list(rows)

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def no_datasets(monkeypatch):
    """As if the library were not installed."""
    monkeypatch.setitem(sys.modules, "datasets", None)
