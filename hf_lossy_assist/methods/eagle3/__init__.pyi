"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import collect as collect
from . import dspark_fit as dspark_fit
from . import fit as fit
from . import initialise as initialise
