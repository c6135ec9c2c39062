"""Where drafted tokens come from: one file for each drafter."""

from .base import Drafter
from .candidates import CandidateDrafter
from .model import ModelDrafter


__all__ = ["CandidateDrafter", "Drafter", "ModelDrafter"]
