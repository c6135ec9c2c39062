"""Verify filters: how many drafted tokens of each row go to the target. `base` says what a filter answers; every other file holds one."""

from collections.abc import Mapping

from ..registry import Names
from .base import VerifyAll, VerifyFilter


__all__ = ["FILTERS", "VerifyAll", "VerifyFilter"]

FILTERS: Mapping[str, type[VerifyFilter]] = Names("filter")  # by name; every file of this room is read
