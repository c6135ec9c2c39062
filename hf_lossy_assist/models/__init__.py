"""What a Transformers model is, and how it runs on a cache that can forget."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
