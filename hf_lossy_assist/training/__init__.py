"""Train heads for a pair of models: jobs that run before generate calls, never inside them."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
