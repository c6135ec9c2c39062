"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import probe as probe
from . import weight_versions as weight_versions
