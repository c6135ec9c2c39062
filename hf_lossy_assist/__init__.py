"""Assisted generation for Hugging Face Transformers that is faster, batched and measured, lossless or knowingly lossy.

Names are imported on first use: `import hf_lossy_assist` alone loads neither torch nor Transformers. `__init__.pyi`
lists them.
"""

import warnings
from typing import Any

import lazy_loader


__version__ = "0.1.0"
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
RENAMED = {"Verification": "SVFilter", "stock_stop": "in_transformers_loop"}  # old → new; `__init__.pyi` has both


def __getattr__(name: str) -> Any:
    if name in RENAMED:
        warnings.warn(f"{__name__}.{name} is now called {RENAMED[name]}", DeprecationWarning, stacklevel=2)
        name = RENAMED[name]
    return _load(name)
