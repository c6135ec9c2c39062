"""Assisted generation for Hugging Face Transformers that is faster, batched and measured, lossless or knowingly lossy.

Names are imported on first use: `import hf_lossy_assist` alone loads neither torch nor Transformers. `__init__.pyi`
lists them.
"""

import lazy_loader


__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
