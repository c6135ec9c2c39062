"""Modules of this room, imported when they are first used: `__init__.py` reads this list, type checkers too."""

from . import http as http
from . import requests as requests
from . import routes as routes
from . import worker as worker
