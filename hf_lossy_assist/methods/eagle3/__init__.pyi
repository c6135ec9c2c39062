"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import collect as collect
from . import data as data
from . import fit as fit
from . import initialise as initialise
