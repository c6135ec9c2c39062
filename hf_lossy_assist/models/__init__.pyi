"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import weights as weights
from . import probe as probe
