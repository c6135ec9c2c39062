from . import (
    collect as collect,
)
from . import (
    data as data,
)
from . import (
    fit as fit,
)
from . import (
    initialise as initialise,
)
