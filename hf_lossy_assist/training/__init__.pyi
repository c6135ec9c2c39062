"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import head_training as head_training
from . import jobs as jobs
from . import processes as processes
from . import run_folder as run_folder
