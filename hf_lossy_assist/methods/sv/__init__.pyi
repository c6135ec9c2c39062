"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import baselines as baselines
from . import profiled_runner as profiled_runner
from . import profiling as profiling
