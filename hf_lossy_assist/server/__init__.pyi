from . import (
    http as http,
)
from . import (
    requests as requests,
)
from . import (
    routes as routes,
)
from . import (
    worker as worker,
)
