from . import (
    baselines as baselines,
)
from . import (
    profiled_runner as profiled_runner,
)
from . import (
    profiling as profiling,
)
