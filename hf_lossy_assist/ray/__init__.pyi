"""Public names of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from .cluster import Workers as Workers
from .dataset_writer import Writer as Writer
from .dataset_writer import seed_of_row as seed_of_row
from .serve import app as app
