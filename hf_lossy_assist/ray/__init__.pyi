"""Public names of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from .cluster import Workers as Workers
from .dataset_writer import Writer as Writer
from .serve import app as app
