from . import (
    autojudge as autojudge,
)
from . import (
    eagle3 as eagle3,
)
from . import (
    specdec as specdec,
)
from . import (
    sprinter as sprinter,
)
from . import (
    sv as sv,
)
