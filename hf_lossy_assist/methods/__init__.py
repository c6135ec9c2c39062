"""A room for each published method: how its data is collected, its head trained, its cost predicted."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
