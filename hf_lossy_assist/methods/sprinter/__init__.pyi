"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import collect as collect
from . import collect_runner as collect_runner
from . import fit as fit
from . import specdec_fit as specdec_fit
