"""Acceptance rules: which drafted tokens to keep, and from what to draw the token after them.

`base` says what a rule answers, `acceptance` how a round ends; every other file holds rules of one kind, which register themselves.
"""

from collections.abc import Mapping

from ..registry import Names
from .acceptance import accept
from .base import AcceptanceRule, RuleRun, Strict, draw


__all__ = ["RULES", "AcceptanceRule", "RuleRun", "Strict", "accept", "draw"]

RULES: Mapping[str, type[AcceptanceRule]] = Names("rule")  # by name; every file of this room is read
