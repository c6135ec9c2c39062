"""Draft stops decide when a row has drafted enough, never what is accepted: under strict acceptance every stop is lossless."""

from collections.abc import Mapping

from ..registry import Names
from .base import DraftStop, StopRun, entropy


__all__ = ["STOPS", "DraftStop", "StopRun", "entropy"]

STOPS: Mapping[str, type[DraftStop]] = Names("stop")  # by name, from every file of this package
