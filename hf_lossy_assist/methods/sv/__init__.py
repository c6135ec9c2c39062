"""Speculative Verification: a companion model that predicts which drafted tokens are worth verifying."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
