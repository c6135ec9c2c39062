"""How many texts `generate_many` has places for, and who has one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Room:
    """How many texts may be in flight, and how many tokens they may come to."""

    rows: int
    tokens: int | None = None

    def fits(self, going: Sequence[int], more: int, held: int = 0) -> bool:
        """Whether a text of `more` tokens fits beside those of `going` and `held` tokens of prompts read ahead. One text always does."""
        return not going or (len(going) < self.rows and self.holds([*going, more], held))

    def holds(self, going: Sequence[int], held: int) -> bool:
        """Whether there is memory for the texts of `going` and `held` tokens beside them."""
        return self.tokens is None or sum(going) + held <= self.tokens

    def reads(self, going: Sequence[int], prompts: Sequence[int], most: int) -> bool:
        """Whether `prompts` of so many tokens, `most` together and no more than there are places, can be held beside the texts of `going`."""
        return len(prompts) <= self.rows and sum(prompts) <= most and self.holds(going, sum(prompts))


@dataclass
class Seated:
    """A text in flight."""

    index: int  # of its prompt
    prompt: list[int]
    overrides: dict[str, Any]  # settings
    longest: int  # tokens that it can come to
    read: bool = False  # whether the models have read its prompt
    settled: bool = False  # whether what was read is in storage of its own
    began: float = 0.0  # when it was given a place, as `time.perf_counter` counts
