"""How many texts `generate_many` has places for, and who has one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Room:
    """How many texts may be in flight, and how many tokens they may come to."""

    rows: int
    tokens: int | None = None

    def fits(self, going: Sequence[int], more: int) -> bool:
        """Whether a text of `more` tokens fits beside those of `going`. One text always does."""
        tokens = self.tokens is None or sum(going) + more <= self.tokens
        return not going or (len(going) < self.rows and tokens)

    def reads(self, going: Sequence[int], prompts: Sequence[int], most: int) -> bool:
        """Whether `prompts` of so many tokens, `most` together and no more than there are places, can be held beside the texts of `going`."""
        tokens = self.tokens is None or sum(going) + sum(prompts) <= self.tokens
        return len(prompts) <= self.rows and sum(prompts) <= most and tokens


@dataclass
class Seated:
    """A text in flight."""

    index: int  # of its prompt
    prompt: list[int]
    own: dict[str, Any]  # settings
    longest: int  # tokens that it can come to
    read: bool = False  # whether the models have read its prompt
    settled: bool = False  # whether what was read is in storage of its own
    began: float = 0.0  # when it was given a place, as `time.perf_counter` counts
