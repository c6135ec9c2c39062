"""The processes that `accelerate launch` started for one job: who does what, and what all of them know in the end."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar


T = TypeVar("T")
LONGEST_WAIT = timedelta(days=30)  # a process may be done long before another; one that has ended ends the job at once


@dataclass(frozen=True)
class Processes:
    """One of `count` processes, number `rank`; by itself the only one."""

    rank: int = 0
    count: int = 1

    @classmethod
    def started(cls) -> "Processes":
        """Those that `accelerate launch` (or torchrun) started, connected to each other."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        import torch
        from accelerate import PartialState

        state = PartialState(cpu=not torch.accelerator.is_available(), timeout=LONGEST_WAIT)
        if state.num_processes != int(os.environ["WORLD_SIZE"]):
            raise ValueError(
                f"{os.environ['WORLD_SIZE']} processes were started, and accelerate connects {state.num_processes}: start them with torchrun"
            )
        return cls(state.process_index, state.num_processes)

    @property
    def first(self) -> bool:
        """Whether this is the one that writes what all share."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """What this process does of `items`: every `count`-th."""
        return list(items[self.rank :: self.count])

    def wait(self) -> None:
        """Until all are here."""
        self.all(None)

    def all(self, value: T) -> list[T]:
        """The `value` of each process, in their order; until all are here."""
        if self.count == 1:
            return [value]
        from torch.distributed import all_gather_object

        values: list[T | None] = [None] * self.count
        all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def on_first(self, work: Callable[[], object]) -> None:
        """`work` in the first process; what it refuses there, all refuse."""
        refusal: Exception | None = None
        if self.first:
            try:
                work()
            except (ValueError, OSError) as error:
                refusal = error
        if (said := self.all(refusal)[0]) is not None:
            raise said

    def others(self, value: T) -> list[T]:
        """Return the values of the other processes, in the order of their ranks."""
        values = self.all(value)
        return values[: self.rank] + values[self.rank + 1 :]


ALONE = Processes()
