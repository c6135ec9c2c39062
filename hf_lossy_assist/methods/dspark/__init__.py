"""Training of DSpark drafters on the texts that EAGLE-3's `collect` stores."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
