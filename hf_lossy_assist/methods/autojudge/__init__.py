"""AutoJudge: a head that accepts mismatches that do not change the answer."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
