"""Training of EAGLE-3 drafters: the target writes texts (`collect`), and a network learns to draft them (`fit`)."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
