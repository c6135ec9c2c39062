"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import profiled_runner as profiled_runner
from . import profiling as profiling
