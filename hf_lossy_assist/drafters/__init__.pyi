"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import base as base
from . import trained as trained
