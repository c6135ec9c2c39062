from . import (
    collect as collect,
)
from . import (
    collect_runner as collect_runner,
)
from . import (
    fit as fit,
)
