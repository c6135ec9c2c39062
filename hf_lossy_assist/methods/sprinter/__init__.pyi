"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import collect as collect
from . import collect_runner as collect_runner
from . import fit as fit
