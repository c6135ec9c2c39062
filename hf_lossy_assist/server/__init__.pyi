"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import fields as fields
from . import http as http
from . import routes as routes
from . import worker as worker
