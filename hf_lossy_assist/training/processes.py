"""Share the units of work of one job among the processes that `accelerate launch` started."""

import atexit
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from .. import artifacts
from ..terminal import Bar
from ..validation import one_line


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafters.hidden_state import DraftModel

T = TypeVar("T")
M = TypeVar("M", bound=tuple[object, ...])  # target, draft or drafts, tokenizer
Models: TypeAlias = "tuple[PreTrainedModel, DraftModel | None, PreTrainedTokenizerBase]"


class TellUnit(Protocol):
    """A function to call with a unit's number, the share of it that is done, and what is being done now."""

    def __call__(self, index: int, portion: float, what: str = "") -> None: ...


Work: TypeAlias = Callable[[M, Sequence[int], TellUnit], Iterable[tuple[int, T]]]
# For the slowest process: one that has died ends the job at once, a machine that has lost power or network after this.
LONGEST_WAIT = timedelta(hours=6)
RESUME = "the same command with --resume goes on from what is done"


def _disconnect() -> None:
    """Destroy the process group, if it still exists."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Processes:
    """One of `count` processes, with number `rank`; by default the only one. A backend for units of work; `hla.ray.Workers` is another."""

    rank: int = 0
    count: int = 1

    @classmethod
    def started(cls) -> "Processes":
        """Connect the processes that `accelerate launch` (or torchrun) started, and return this one."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        import torch
        from accelerate import PartialState

        state = PartialState(cpu=not torch.accelerator.is_available(), timeout=LONGEST_WAIT)
        # A process that exits while gloo's threads still run is occasionally aborted (SIGABRT).
        atexit.unregister(_disconnect)
        atexit.register(_disconnect)
        return cls(state.process_index, state.num_processes)

    @property
    def first(self) -> bool:
        """Whether this process writes what all share."""
        return self.rank == 0

    def connected(self) -> AbstractContextManager[None]:
        """Connect to what does the work within a context, before anything is written."""
        return nullcontext()

    def find_machine(self, device: "torch.device") -> str:
        """Return the name of the machine that times the work, with models on `device`."""
        return artifacts.conditions.describe_machine(device)

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this process's share of `items`: every `count`-th."""
        return list(items[self.rank :: self.count])

    def run(
        self,
        work: Work[M, T],
        models: M,
        units: Sequence[int],
        write: Callable[[int, T], object],
        named: tuple[str, str],
        at_once: int = 1,
    ) -> None:
        """Run a job's remaining units of work, each once and anywhere, and wait for all of them.

        Args:
            work: yields each unit's result. It names no models itself: another backend calls it in processes that load the same ones.
            write: called with each unit's number and result, in the process that stores it.
            named: what is being done, and to what, for the bar. at_once: units that share a batch.
        """
        share, done = self.share(units), dict[int, float]()
        with Bar(len(share), *named, quiet=not self.first) as bar:

            def tell(index: int, portion: float, what: str = "") -> None:
                if what:
                    bar.say(what)
                done[index] = portion
                bar.to(sum(done.values()))

            for index, result in work(models, share, tell):
                write(index, result)
                tell(index, 1.0)
        self.wait()

    def wait(self) -> None:
        """Wait for all processes."""
        self.all(None)

    def all(self, value: T) -> list[T]:
        """Wait for all processes and return the `value` of each, by rank. Raises: `ConnectionError` if one has ended."""
        if self.count == 1:
            return [value]
        from torch.distributed import all_gather_object

        values: list[T | None] = [None] * self.count
        try:
            all_gather_object(values, value)
        except RuntimeError as error:
            raise ConnectionError(
                f"rank {self.rank} lost the others, of which one has ended ({one_line(error, 120)}): see its log; {RESUME}"
            ) from None
        return values  # type: ignore[return-value]

    def on_first(self, work: Callable[[], object]) -> None:
        """Run `work` in the first process; raise its error in all of them."""
        refusal: Exception | None = None
        if self.first:
            try:
                work()
            except (ValueError, OSError) as error:
                refusal = error
        if (raised := self.all(refusal)[0]) is not None:
            raise raised

    def others(self, value: T) -> list[T]:
        """Return the values of the other processes, ordered by rank."""
        values = self.all(value)
        return values[: self.rank] + values[self.rank + 1 :]


ALONE = Processes()
