"""Where drafted tokens come from: `base` says what a drafter answers; every other file holds one."""

from .base import Drafter, DrafterRun


__all__ = ["Drafter", "DrafterRun"]
