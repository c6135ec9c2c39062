"""Draft stops: when a row has drafted enough.

A `DraftStop` is settings; `start(rows)` gives the `StopRun` of one generate call. The run is a `transformers.StoppingCriteria`, so a
stop also works inside Transformers' own assisted generation (`generation.stock.stock_stop`).

A stop changes how much is drafted and never what is accepted, so under strict acceptance every stop is lossless.
"""

from collections.abc import Mapping

from ..registry import Names
from .base import DraftStop, StopRun, entropy
from .basic import SVIP, Confidence, Constant, Heuristic
from .combined import AllOf, AnyOf
from .fallback import Fallback
from .goodput import BatchSchedule, MovingAverage
from .heads import HeadStop, SpecDecPP
from .learning import DISCO, AdaEDL
from .wrapping import AtLeast


__all__ = [
    "DISCO", "STOPS", "SVIP", "AdaEDL", "AllOf", "AnyOf", "AtLeast", "BatchSchedule", "Confidence", "Constant", "DraftStop",
    "Fallback", "HeadStop", "Heuristic", "MovingAverage", "SpecDecPP", "StopRun", "entropy",
]  # fmt: skip

STOPS: Mapping[str, type[DraftStop]] = Names("stop")  # by name, as they register themselves
