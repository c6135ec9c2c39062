"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import bodies as bodies
from . import http as http
from . import named_drafters as named_drafters
from . import routes as routes
from . import settings as settings
from . import worker as worker
