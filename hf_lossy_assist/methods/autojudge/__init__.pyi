"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import classifiers as classifiers
from . import dataset as dataset
from . import fit as fit
from . import mine as mine
from . import mining_loop as mining_loop
