"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import classifiers as classifiers
from . import dataset as dataset
from . import fit as fit
from . import mine as mine
from . import mining_loop as mining_loop
