"""Where drafted tokens come from: `base` says what a drafter answers; every other file holds one."""

from .base import Drafter, DrafterRun
from .composite import CompositeDrafter
from .model import AssistantDrafter
from .suffix import SuffixDrafter, SuffixMemory


__all__ = ["AssistantDrafter", "CompositeDrafter", "Drafter", "DrafterRun", "SuffixDrafter", "SuffixMemory"]
