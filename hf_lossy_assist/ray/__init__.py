"""Past one machine, on Ray's scheduling, retries and autoscaling. Names are imported on first use, and so is `ray`."""

import importlib.util
from typing import Any

import lazy_loader


_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in __all__ and importlib.util.find_spec("ray") is None:
        raise ImportError(f"hf_lossy_assist.ray.{name} needs ray: pip install 'hf_lossy_assist[ray]'")
    return _load(name)
