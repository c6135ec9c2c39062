"""Draft stops: when a row has drafted enough.

A `DraftStop` is settings; `start(rows)` gives the `StopRun` of one generate call. The run is a `transformers.StoppingCriteria`, so a
stop also works inside Transformers' own assisted generation (`transformers_loop.attach`).

A stop changes how much is drafted and never what is accepted, so under strict acceptance every stop is lossless.
"""

from collections.abc import Mapping

from ..registry import Names
from .base import DraftStop, StopRun, entropy


__all__ = ["STOPS", "DraftStop", "StopRun", "entropy"]

STOPS: Mapping[str, type[DraftStop]] = Names("stop")  # by name; every file of this room is read
