"""Draft stops decide when a row has drafted enough.

A `DraftStop` holds the settings; `start(rows)` returns the `StopRun` of one generate call. The run is a `transformers.StoppingCriteria`,
so that it also works inside Transformers' assisted generation (`transformers_loop.attach`).

A stop changes how much is drafted, never what is accepted: under strict acceptance every stop is lossless.
"""

from collections.abc import Mapping

from ..registry import Names
from .base import DraftStop, StopRun, entropy


__all__ = ["STOPS", "DraftStop", "StopRun", "entropy"]

STOPS: Mapping[str, type[DraftStop]] = Names("stop")  # by name, from every file of this package
