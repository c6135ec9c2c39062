"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import endpoint as endpoint
from . import load as load
from . import prompts as prompts
from . import qa as qa
