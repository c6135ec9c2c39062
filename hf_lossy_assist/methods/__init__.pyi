"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import autojudge as autojudge
from . import eagle3 as eagle3
from . import sprinter as sprinter
from . import sv as sv
