"""Read facts of Transformers models and run them on caches that support rollback."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
