"""A target whose weights are sharded over ranks (FSDP2): each rank decodes texts of its own, and all run its forwards together.

Each forward gathers the weights from all ranks, so no rank can run one alone. Before each of them the ranks meet; one that is done goes on
with forwards whose results nobody reads, until all are done.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from .introspection import base_of
from .led import OtherRankFailed
from .row_model import RowModel


class State(IntEnum):
    """What a rank says of itself when the ranks meet."""

    RUNS, DONE, FAILED = range(3)


class Steps:
    """The forwards that the ranks of a sharded target run together."""

    leads = True  # each rank decodes its own texts

    def __init__(self, model: Any, device: torch.device):
        self.model, self.device = model, device
        self.met = False  # whether what fails from now on is told of by `run`
        self.within = False  # a forward, in the middle of which the other ranks are too

    @classmethod
    def of(cls, model: Any, device: torch.device, synced: bool | None) -> "Steps | None":
        """Those of a call, or None where each rank runs by itself. `synced`: what the call says of it, as `synced_gpus`."""
        asked = is_sharded(model) if synced is None else synced
        return cls(model, device) if asked and is_one_of_several() else None

    def row_model(self, *size: Any) -> "SteppedModel":
        """The target on a cache of rows. Takes `RowModel`'s arguments."""
        return SteppedModel(*size, steps=self)

    def forward(self, run: Callable[..., Any], **inputs: Any) -> Any:
        """`run(**inputs)`, together with a forward of each other rank. Raises: `OtherRankFailed`."""
        self.within = True
        self._meet(State.RUNS)
        out = run(**inputs)
        self.within = False
        return out

    def fail(self) -> None:
        """Tell the others, which are here or come here, that this rank's call ended before its first forward."""
        self._meet(State.FAILED)

    def run(self, decode: Callable[[], Any]) -> Any:
        """What `decode` returns, which runs the target; returns when all ranks are done. Raises: `OtherRankFailed`."""
        self.met = True
        try:
            out = decode()
        except OtherRankFailed:
            raise  # at a meeting, so all know
        except BaseException:
            if not self.within:
                self._meet(State.FAILED)
            raise
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self._meet(State.DONE):
            self.model(input_ids=one, use_cache=False)
        return out

    def _meet(self, mine: State) -> bool:
        """Tell the others, once all are here; whether any still runs. Raises: `OtherRankFailed`, but for the one that did."""
        counts = torch.zeros(len(State), dtype=torch.int64, device=self.device)
        counts[mine] = 1
        dist.all_reduce(counts)
        if counts[State.FAILED] and mine != State.FAILED:
            raise OtherRankFailed("another rank of this target ended with an error, which it tells of itself")
        return bool(counts[State.RUNS])


class SteppedModel(RowModel):
    """A sharded target on a cache of rows."""

    def __init__(self, *args: Any, steps: Steps):
        super().__init__(*args)
        self.steps, self.run = steps, partial(steps.forward, self.run)
        self.packs = False  # that forward does not go through `run`


def is_one_of_several() -> bool:
    """Whether this process has others beside it."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_sharded(model: Any) -> bool:
    """Tell whether FSDP2 spreads a model's weights, or those of a part of it, over several processes."""
    return is_one_of_several() and any(isinstance(module, FSDPModule) for module in base_of(model).modules())


def is_zero3(model: Any) -> bool:
    """Tell whether DeepSpeed's ZeRO-3 has taken a model's weights apart; it marks each parameter."""
    return is_one_of_several() and any(hasattr(weight, "ds_id") for weight in base_of(model).parameters())
