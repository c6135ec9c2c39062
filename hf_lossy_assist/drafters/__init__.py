"""Sources of drafted tokens: `base` is the seam, every other file one kind of drafter."""

from .base import Drafter, DrafterRun


__all__ = ["Drafter", "DrafterRun"]
