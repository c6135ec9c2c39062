"""The interface to Transformers' `generate`: arguments, checks and output."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
