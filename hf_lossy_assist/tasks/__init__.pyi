from . import (
    endpoint as endpoint,
)
from . import (
    load as load,
)
from . import (
    prompts as prompts,
)
from . import (
    qa as qa,
)
