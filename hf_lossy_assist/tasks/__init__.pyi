"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import load as load
from . import prompts as prompts
