"""Stops that do not read the draft: constant length, by the last round, by the number of rows."""

from collections.abc import Mapping
from typing import ClassVar

from ..registry.frozen import DraftLength
from ..validation import LONGEST_DRAFT, check_int
from .base import DraftStop, StopRun


class Constant(DraftStop, name="constant", paper="2211.17192"):
    """Always draft `gamma` tokens (Leviathan et al.); 5 is the constant baseline of the SVIP and SPRINTER papers."""

    gamma: DraftLength = 5
    adaptive: ClassVar[bool] = False

    @property
    def longest(self) -> int:
        return self.gamma

    def with_longest(self, gamma: int) -> "Constant":
        return Constant(gamma)


class Heuristic(DraftStop, name="heuristic", paper="Transformers"):
    """Draft two tokens more after a round with all tokens accepted, else one less; between 1 and `max_draft`.

    Transformers' "heuristic" schedule with the cap of the SVIP paper's baseline. Each row has a separate length.
    """

    initial: DraftLength = 5
    max_draft: DraftLength = 40
    adaptive: ClassVar[bool] = False

    def with_longest(self, gamma: int) -> "Heuristic":
        return Heuristic(gamma, max(gamma, self.max_draft))

    def start(self, rows: int) -> "HeuristicRun":
        return HeuristicRun(self, rows)


class HeuristicRun(StopRun):
    """The run of `Heuristic`. `lengths`: each row's draft length in the next round."""

    settings: Heuristic
    row_lists: ClassVar[tuple[str, ...]] = ("lengths",)

    def __init__(self, settings: Heuristic, rows: int):
        super().__init__(settings)
        self.lengths = [settings.initial] * rows

    def begin_round(self, rows: list[int]) -> list[int]:
        return [self.lengths[row] for row in rows]

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        for row, d, n in zip(rows, drafted, accepted, strict=True):
            length = self.lengths[row]
            self.lengths[row] = min(length + 2, self.settings.max_draft) if n == d else max(length - 1, 1)


class BatchSchedule(DraftStop, name="batch_schedule", paper="vLLM, TensorRT-LLM", example={"table": [[1, 8], [8, 2]]}):
    """Choose γ by the number of unfinished rows: `table` lists pairs (rows, γ), and the last one with at most that many rows applies.

    `{1: 7, 4: 5, 32: 2}` drafts 7 tokens for 1 to 3 rows, 5 for 4 to 31, and 2 from 32; γ may be 0. The table must start at 1 row.
    vLLM's `num_speculative_tokens_per_batch_size` and TensorRT-LLM's `draft_len_schedule` are such tables.
    """

    table: tuple[tuple[int, int], ...]
    adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        pairs = self.table.items() if isinstance(self.table, Mapping) else self.table
        lines = sorted((int(rows) if isinstance(rows, str) else rows, gamma) for rows, gamma in pairs)
        object.__setattr__(self, "table", tuple(lines))
        for rows, gamma in lines:
            check_int("BatchSchedule.table: rows", rows, 1)
            check_int(f"BatchSchedule.table: γ of {rows} rows", gamma, 0, LONGEST_DRAFT)
        sizes = [rows for rows, _ in lines]
        if sizes[:1] != [1] or len(set(sizes)) < len(sizes):
            raise ValueError(f"BatchSchedule.table: expected a line for 1 row and each size once, got {sizes}")

    @property
    def longest(self) -> int:
        return max(gamma for _, gamma in self.table)

    def with_longest(self, gamma: int) -> "BatchSchedule":
        """Return a copy with every γ capped at `gamma`."""
        return BatchSchedule(tuple((rows, min(length, gamma)) for rows, length in self.table))

    def limits(self, rows: list[int]) -> list[int]:
        return [max((line for line in self.table if line[0] <= len(rows)), default=(0, 0))[1]] * len(rows)
