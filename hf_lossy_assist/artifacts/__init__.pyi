"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import conditions as conditions
from . import features as features
from . import files as files
from . import head as head
from . import identity as identity
from . import loading as loading
from . import sv_profile as sv_profile
