"""ALiBi on a cache of rows: biases by the places of keys (BLOOM, Falcon, MPT), which are the same for every row there.

Token number i of each row is at place i, so that the biases are those of a text without padding; only what may be seen differs between rows.
BLOOM's and Falcon's function takes the mask of a text, (B, n), and a cache of rows has one for each token of the forward, (B, 1, Q, n). MPT's makes
biases for its longest text, and a block's padding may reach beyond it.
"""

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .cache_name import CACHE
from .replaced import Replacing


_files: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # of each model, those modelling files of its own
_visible: ContextVar[int] = ContextVar("visible", default=0)  # places that the forward under way in this thread sees


def with_alibi(model: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """`model`, or for one that makes biases of its mask a callable like it that takes masks for each token."""
    if base not in _files:
        named = {
            type(part).__module__ for part in base.modules()
        }  # somebody's own class may say that it is of no file
        files = [sys.modules[name] for name in sorted(named) if name in sys.modules]
        _files[base] = [its for its in files if any(hasattr(its, name) for name in CHANGED)]
    return partial(_run, model, _files[base]) if _files[base] else model


def _run(model: Callable[..., Any], files: Sequence[Any], **inputs: Any) -> Any:
    token = _visible.set(inputs[CACHE].visible)
    try:
        with _changed.within(files):
            return model(**inputs)
    finally:
        _visible.reset(token)


def _by_place(own: Callable[..., Any], mask: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`own`; of a mask for each token (B, 1, Q, n) the biases of n tokens of which none is hidden. Another thread's mask is (B, n)."""
    if mask.dim() == 4:
        mask = torch.ones(mask.shape[0], mask.shape[-1], dtype=torch.int64, device=mask.device)
    return own(mask, *args, **kwargs)


def _long_enough(own: Callable[..., Any], heads: int, longest: int, *args: Any, **kwargs: Any) -> Any:
    """`own` of a longer text, of whose biases the model takes the last ones. In another thread as it is."""
    return own(heads, max(longest, _visible.get()), *args, **kwargs)


CHANGED: dict[str, Callable[..., Any]] = {"build_alibi_tensor": _by_place, "build_mpt_alibi_tensor": _long_enough}


def _changes(file: Any) -> dict[str, Any]:
    return {name: partial(its, getattr(file, name)) for name, its in CHANGED.items() if hasattr(file, name)}


_changed = Replacing(_changes)
