"""Sources of drafted tokens: `base` has the interface, every other file one kind of drafter."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
