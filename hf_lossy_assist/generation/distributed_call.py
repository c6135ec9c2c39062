"""Calls whose target is distributed over ranks.

With tensor parallelism, every rank makes the call, the first one decodes, and all return its result. With FSDP2, every rank makes a separate
call, and all run the forwards together.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import is_fsdp_managed_module

from ..batch.rows import Rows
from ..models.cached_model import CachedModel
from ..models.distributed import (
    END,
    FAILED,
    LeaderModel,
    LockstepGroup,
    LockstepModel,
    OtherRankFailed,
    RankGroup,
    TensorParallelGroup,
    follow,
    is_sharded,
    is_spread,
    is_zero3,
)
from ..models.introspection import base_of, device_of
from ..models.row_model import RowModel
from ..policy.policy import LossyPolicy
from .prefill import checkpointing_disabled


def refuse_spread(name: str, model: PreTrainedModel | None) -> None:
    """Raise `ValueError` for a model that one rank runs alone but holds only in part. `name`: for the error."""
    if model is None:
        return
    if is_spread(model):
        raise ValueError(
            f"the {name} is spread over ranks (tensor parallelism), and the first rank alone runs it: load it whole, without tp_plan"
        )
    if is_zero3(model):
        raise ValueError(
            f"the {name} is sharded by DeepSpeed's ZeRO-3, which lossy_policy does not run: load it whole"
        )
    if is_sharded(model):
        raise ValueError(f"the {name} is spread over ranks (FSDP2), and each rank runs it by itself: load it whole")


def find_ranks(model: PreTrainedModel, synced: bool | None) -> RankGroup | None:
    """Return the group of ranks that share the target or its forwards; None: the target is whole. `synced`: `synced_gpus` of the call.

    Raises: `ValueError`, one line, for unsupported sharding.
    """
    device, managed = device_of(model), synced is not False and not is_sharded(model)
    if is_zero3(model):
        raise ValueError(
            "the target is sharded by DeepSpeed's ZeRO-3, which lossy_policy does not run: shard it with FSDP2 (fully_shard), or load it with tp_plan"
        )
    if managed and is_fsdp_managed_module(base_of(model)):
        raise ValueError(
            "the target's weights are spread over ranks by the first FSDP, which lossy_policy does not run: shard it with FSDP2 (fully_shard), or pass synced_gpus=False where every rank has the same prompts and seed"
        )
    return TensorParallelGroup.of(model, device) or LockstepGroup.of(model, device, synced)


@contextmanager
def propagate_errors(ranks: RankGroup) -> Iterator[None]:
    """Tell the other ranks of an error that occurs before all have met, since they would wait for this one."""
    try:
        yield
    except BaseException:
        if not ranks.joined:
            ranks.joined = True
            ranks.fail()
        raise


def check_same_call(ranks: RankGroup, rows: Rows, policy: LossyPolicy) -> None:
    """Raise `ValueError`, on every rank, if the ranks of a tensor-parallel target make different calls."""
    if isinstance(ranks, TensorParallelGroup):
        texts = hashlib.sha256(repr((rows.ids[:, : rows.width].tolist(), rows.pads)).encode()).hexdigest()
        ranks.agree((texts, rows.max_length, str(policy)), "prompts, lengths or policies")


def run_on_leader(target: CachedModel, decode: Callable[[], object]) -> object:
    """Return the result of `decode`: with tensor parallelism the first rank shares its result; with FSDP2 the ranks run in step."""
    if isinstance(target, LockstepModel):
        return target.group.run(decode)
    if not isinstance(target, LeaderModel):
        return decode()
    ranks = target.group
    try:
        out = decode()
        written = _move(out, torch.device("cpu"))
    except BaseException:
        if not target.broken:
            ranks.broadcast([FAILED])
        raise
    ranks.broadcast([END])
    ranks.share(written)
    return out


def run_on_follower(
    target: CachedModel, ranks: TensorParallelGroup, model: PreTrainedModel, streamer: BaseStreamer | None
) -> object:
    """Run the first rank's forwards on another rank and return its result. Raises: `OtherRankFailed`."""
    assert isinstance(target, RowModel)
    with torch.no_grad(), checkpointing_disabled(model, None):
        well = follow(target, ranks)
    if streamer is not None:
        streamer.end()
    if not well:
        raise OtherRankFailed("rank 0 ended with an error: see its traceback")
    return _move(ranks.share(None), ranks.device)


def _move(value: object, device: torch.device) -> object:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
