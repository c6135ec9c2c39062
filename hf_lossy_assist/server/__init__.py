"""An OpenAI-compatible server that writes the texts of many clients together."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
