"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import identity as identity
from . import probe as probe
