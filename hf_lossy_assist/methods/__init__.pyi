"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import autojudge as autojudge
from . import eagle3 as eagle3
from . import specdec as specdec
from . import sprinter as sprinter
from . import sv as sv
