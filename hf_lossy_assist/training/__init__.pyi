"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import head_quality as head_quality
from . import head_training as head_training
from . import processes as processes
from . import resumable as resumable
