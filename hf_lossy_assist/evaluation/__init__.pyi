"""Modules of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from . import arms as arms
from . import comparison as comparison
from . import lm_eval_models as lm_eval_models
from . import metrics as metrics
from . import recommend as recommend
from . import tuning as tuning
from . import writer as writer
