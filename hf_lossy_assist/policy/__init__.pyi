"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import parse as parse
from . import policy as policy
from . import sharing as sharing
