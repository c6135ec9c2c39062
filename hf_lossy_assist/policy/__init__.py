"""Policies (a rule, a stop and a filter), their recipes, short form, JSON form and files."""

import lazy_loader


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
