"""Verify filters: how many drafted tokens of each row go to the target. `base` has the interface; every other file has one filter."""

from collections.abc import Mapping

from ..registry import Names
from .base import VerifyAll, VerifyFilter


__all__ = ["FILTERS", "VerifyAll", "VerifyFilter"]

FILTERS: Mapping[str, type[VerifyFilter]] = Names("filter")  # by name, from every file of this package
