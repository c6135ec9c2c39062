"""How a model is tried, whatever it is tried on."""

from collections.abc import Callable
from typing import Any

import torch


# What a model may raise at inputs that it does not take: a 4-D mask, a block behind a cache, a position.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)


@torch.no_grad()
def told(base: Any, what: str, attempt: Callable[[], str | None]) -> str | None:
    """The reason that `attempt` returns, or what it fails with, in one line. Dropout is off meanwhile."""
    training = [module for module in base.modules() if module.training]
    for module in training:
        module.training = False
    try:
        return attempt()
    except FAILURES as error:
        said = " ".join(str(error).split())[:160] or type(error).__name__
        return f"a trial on {what} failed ({said})"
    finally:
        for module in training:
            module.training = True
