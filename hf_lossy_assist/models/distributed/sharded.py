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
from transformers import PreTrainedModel

from ..introspection import base_of
from ..row_model import RowModel
from .tensor_parallel import OtherRankFailed, TensorParallelGroup


class RankState(IntEnum):
    """The state that a rank tells the others when the ranks meet."""

    RUNS, DONE, FAILED = range(3)


class LockstepGroup:
    """The ranks of a sharded target, whose forwards run together."""

    leads = True  # each rank decodes its own texts

    def __init__(self, model: PreTrainedModel, device: torch.device):
        self.model, self.device = model, device
        self.joined = False  # whether `run` tells the others of what fails from now on
        self.in_forward = False  # in the middle of which the other ranks are too

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device, synced: bool | None) -> "LockstepGroup | None":
        """Return the group of a call, or None where each rank runs by itself. `synced`: `synced_gpus` of the call."""
        wanted = is_sharded(model) if synced is None else synced
        return cls(model, device) if wanted and is_one_of_several() else None

    def row_model(self, *size: object) -> "LockstepModel":
        """Return the target on a cache of rows. Takes `RowModel`'s arguments."""
        return LockstepModel(*size, group=self)

    def forward(self, run: Callable[..., object], **inputs: object) -> Any:
        """Return `run(**inputs)`, together with a forward of each other rank. Raises: `OtherRankFailed`."""
        self.in_forward = True
        self._meet(RankState.RUNS)
        out = run(**inputs)
        self.in_forward = False
        return out

    def fail(self) -> None:
        """Tell the others, which are here or come here, that this rank's call ended before its first forward."""
        self._meet(RankState.FAILED)

    def run(self, decode: Callable[[], object]) -> Any:
        """Return what `decode` returns, which runs the target, as soon as all ranks are done. Raises: `OtherRankFailed`."""
        self.joined = True
        try:
            out = decode()
        except OtherRankFailed:
            raise  # at a meeting, so all know
        except BaseException:
            if not self.in_forward:
                self._meet(RankState.FAILED)
            raise
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self._meet(RankState.DONE):
            self.model(input_ids=one, use_cache=False)
        return out

    def _meet(self, state: RankState) -> bool:
        """Tell the others, once all are here; return whether any still runs. Raises: `OtherRankFailed`, but for the one that did."""
        counts = torch.zeros(len(RankState), dtype=torch.int64, device=self.device)
        counts[state] = 1
        dist.all_reduce(counts)
        if counts[RankState.FAILED] and state != RankState.FAILED:
            raise OtherRankFailed("another rank of this target ended with an error: see its traceback")
        return bool(counts[RankState.RUNS])


RankGroup = TensorParallelGroup | LockstepGroup


class LockstepModel(RowModel):
    """A sharded target on a cache of rows."""

    def __init__(self, *args: Any, group: LockstepGroup):
        super().__init__(*args)
        self.group, self.run = group, partial(group.forward, self.run)
        self.packs = False  # that forward does not go through `run`


def is_one_of_several() -> bool:
    """Return whether this process has others beside it."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_sharded(model: PreTrainedModel) -> bool:
    """Return whether FSDP2 spreads a model's weights, or those of a part of it, over several processes."""
    return is_one_of_several() and any(isinstance(module, FSDPModule) for module in base_of(model).modules())


def is_zero3(model: PreTrainedModel) -> bool:
    """Return whether DeepSpeed's ZeRO-3 has taken a model's weights apart; it marks each parameter."""
    return is_one_of_several() and any(hasattr(weight, "ds_id") for weight in base_of(model).parameters())
