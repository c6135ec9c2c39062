from . import (
    policy as policy,
)
from . import (
    sharing as sharing,
)
