"""One subpackage per published method: collecting its data, training its head, predicting its cost."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
