"""Acceptance rules: which drafted tokens to accept, and the distribution of the token after them."""

from collections.abc import Mapping

from ..registry import Names
from .acceptance import accept
from .base import AcceptanceRule, RuleRun, Strict, draw


__all__ = ["RULES", "AcceptanceRule", "RuleRun", "Strict", "accept", "draw"]

RULES: Mapping[str, type[AcceptanceRule]] = Names("rule")  # by name, from every file of this package
