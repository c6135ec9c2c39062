"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import parse as parse
from . import policy as policy
from . import sharing as sharing
