"""The door to Transformers: what generate() is given, what it returns, what is refused."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
