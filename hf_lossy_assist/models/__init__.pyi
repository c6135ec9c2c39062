"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import introspection as introspection
from . import probe as probe
