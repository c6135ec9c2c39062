"""Compare policies on models and prompts, for speed and quality of their texts, with intervals."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
