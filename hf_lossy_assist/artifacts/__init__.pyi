"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import conditions as conditions
from . import features as features
from . import files as files
from . import head as head
from . import json_io as json_io
from . import sv_profile as sv_profile
