"""Past one machine, on Ray's scheduling, retries and autoscaling. Names are imported on first use, and so is `ray`."""

from typing import Any

import lazy_loader

from ..validation import require


_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        require(f"hf_lossy_assist.ray.{name}", "ray")
    return _load(name)
