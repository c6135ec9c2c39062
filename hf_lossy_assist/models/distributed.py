"""Targets whose weights are spread over ranks, by tensor parallelism or by FSDP2.

Tensor parallelism: the first rank decodes and broadcasts a small message per forward, and the others feed the target
the same tokens. They see no decisions, so they cannot diverge. FSDP2: each rank decodes different texts. A forward
gathers the weights from all ranks, so all run theirs together; a rank that has finished runs forwards with unused
results until all have.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.generation.utils import is_fsdp_managed_module

from .introspection import base_of, device_of, is_one_of_several
from .row_model import RowModel


T = TypeVar("T")
FEED, SELECT, END, FAILED = range(4)
LONGEST_MESSAGE = 1024  # in integers; a longer message is sent in two parts


class OtherRankFailed(RuntimeError):
    """Another rank of the same target failed."""


class TensorParallelGroup:
    """The ranks that share one target, and the messages from the first to the others."""

    def __init__(self, device: torch.device):
        self.device = device
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.leads = self.rank == 0
        self.joined = False  # whether all ranks have made this call

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device) -> "TensorParallelGroup | None":
        """Return the group of a target spread over all processes by tensor parallelism; None: it is not."""
        return cls(device) if is_spread(model) else None

    def row_model(self, *size: Any) -> RowModel:
        """Return this rank's part of the target on a row cache. Takes the arguments of `RowModel`."""
        out = LeaderModel(*size, group=self) if self.leads else RowModel(*size)
        out.packs = False  # packing is decided per rank, and the decisions could differ
        return out

    def fail(self) -> None:
        """Tell the other ranks, now or when they get here, that this rank's call failed before it began."""
        self._gather(None)

    def agree(self, what: object, name: str) -> None:
        """Refuse a call that differs between ranks. Raises: `ValueError` on all of them; `OtherRankFailed`."""
        self.joined = True
        values = self._gather(what)
        if None in values:
            raise OtherRankFailed("another rank of this target ended with an error: see its traceback")
        if any(other != values[0] for other in values):
            raise ValueError(f"{name} differ between the ranks of one target: every rank must make the same call")

    def _gather(self, what: object) -> list[object]:
        gathered: list[object] = [None] * self.count
        dist.all_gather_object(gathered, what)
        return gathered

    def share(self, value: T) -> T:
        """Return the first rank's `value` on all ranks."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def broadcast(self, values: Sequence[int]) -> None:
        """Send integers from the first rank to the others."""
        first, rest = values[: LONGEST_MESSAGE - 1], values[LONGEST_MESSAGE - 1 :]
        message = torch.zeros(LONGEST_MESSAGE, dtype=torch.int64)
        message[: 1 + len(first)] = torch.tensor([len(values), *first])
        dist.broadcast(message.to(self.device), src=0)
        if rest:
            dist.broadcast(torch.tensor(rest, dtype=torch.int64, device=self.device), src=0)

    def receive(self) -> list[int]:
        """Return the integers that the first rank broadcast."""
        message = torch.zeros(LONGEST_MESSAGE, dtype=torch.int64, device=self.device)
        dist.broadcast(message, src=0)
        count, *values = message.tolist()
        if count > len(values):
            rest = torch.zeros(count - len(values), dtype=torch.int64, device=self.device)
            dist.broadcast(rest, src=0)
            values += rest.tolist()
        return values[:count]


class LeaderModel(RowModel):
    """The target on the first rank, which broadcasts each operation to the others."""

    def __init__(self, *args: Any, group: TensorParallelGroup):
        super().__init__(*args)
        self.group, self._feeding = group, False
        self.broken = False  # a forward failed here, and the others may be in the middle of it

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        if self._feeding:  # a nested feed
            return super().feed(tokens, counts, keep)
        head = [FEED, *tokens.shape, -1 if keep is None else keep]
        self.group.broadcast([*head, *self.lengths, *counts, *tokens.reshape(-1).tolist()])
        self._feeding, self.broken = True, True
        try:
            logits = super().feed(tokens, counts, keep)
        finally:
            self._feeding = False
        self.broken = False
        return logits

    def select(self, rows: Sequence[int]) -> None:
        self.group.broadcast([SELECT, *rows])
        super().select(rows)

    def export(self, rows: int, mask: torch.Tensor | None) -> None:
        """Return None: each rank holds only a part of the cache."""


def follow(model: RowModel, group: TensorParallelGroup) -> bool:
    """Repeat the first rank's operations until its call ends; return False if it failed."""
    while True:
        what, *values = group.receive()
        if what in (END, FAILED):
            return what == END
        if what == SELECT:
            model.select(values)
            continue
        rows, width, keep = values[:3]
        lengths, counts = values[3 : 3 + rows], values[3 + rows : 3 + 2 * rows]
        tokens = torch.tensor(values[3 + 2 * rows :], dtype=torch.int64).view(rows, width)
        model.rollback(lengths)
        model.feed(tokens, counts, None if keep < 0 else keep)


def is_spread(model: PreTrainedModel) -> bool:
    """Return whether tensor parallelism spreads a model's weights over processes."""
    size = getattr(base_of(model), "tp_size", None)
    return size is not None and size > 1


class RankState(IntEnum):
    """State that a rank reports when all ranks synchronise."""

    RUNS, DONE, FAILED = range(3)


class LockstepGroup:
    """The ranks of a sharded target, which run their forwards together."""

    leads = True  # each rank decodes different texts

    def __init__(self, model: PreTrainedModel, device: torch.device):
        self.model, self.device = model, device
        self.joined = False  # whether `run` reports failures to the others from now on
        self.in_forward = False  # whether this rank, and so every other, is in a forward

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device, synced: bool | None) -> "LockstepGroup | None":
        """Return the group of a call, or None if each rank runs independently. `synced`: the call's `synced_gpus`."""
        wanted = is_sharded(model) if synced is None else synced
        return cls(model, device) if wanted and is_one_of_several() else None

    def row_model(self, *size: object) -> "LockstepModel":
        """Return the target on a row cache. Takes the arguments of `RowModel`."""
        return LockstepModel(*size, group=self)

    def forward(self, run: Callable[..., T], **inputs: object) -> T:
        """Return `run(**inputs)`, executed together with a forward on each other rank. Raises: `OtherRankFailed`."""
        self.in_forward = True
        self._meet(RankState.RUNS)
        out = run(**inputs)
        self.in_forward = False
        return out

    def fail(self) -> None:
        """Tell the other ranks, now or when they get here, that this rank's call failed before its first forward."""
        self._meet(RankState.FAILED)

    def run(self, decode: Callable[[], T]) -> T:
        """Run `decode`, which runs the target, and return its result once all ranks have finished.
        Raises: `OtherRankFailed`."""
        self.joined = True
        try:
            out = decode()
        except OtherRankFailed:
            raise  # raised by `_meet`, so all ranks know
        except BaseException:
            if not self.in_forward:
                self._meet(RankState.FAILED)
            raise
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self._meet(RankState.DONE):
            self.model(input_ids=one, use_cache=False)
        return out

    def _meet(self, state: RankState) -> bool:
        """Wait for all ranks and report this one's state; return whether any still runs.
        Raises: `OtherRankFailed`, except on the failed rank."""
        counts = torch.zeros(len(RankState), dtype=torch.int64, device=self.device)
        counts[state] = 1
        dist.all_reduce(counts)
        if counts[RankState.FAILED] and state != RankState.FAILED:
            raise OtherRankFailed("another rank of this target ended with an error: see its traceback")
        return bool(counts[RankState.RUNS])


class LockstepModel(RowModel):
    """A sharded target on a row cache."""

    def __init__(self, *args: Any, group: LockstepGroup):
        super().__init__(*args)
        self.group, self.run = group, partial(group.forward, self.run)
        self.packs = False  # packed forwards do not go through `run`


def is_sharded(model: PreTrainedModel) -> bool:
    """Return whether FSDP2 shards a model's weights, or some of them, over several processes."""
    return is_one_of_several() and any(isinstance(module, FSDPModule) for module in base_of(model).modules())


def is_zero3(model: PreTrainedModel) -> bool:
    """Return whether DeepSpeed ZeRO-3 has partitioned a model's weights; it marks each parameter."""
    return is_one_of_several() and any(hasattr(weight, "ds_id") for weight in base_of(model).parameters())


RankGroup = TensorParallelGroup | LockstepGroup


# -- round a call -----------------------------------------------------------------------------------------------------


def refuse_spread(name: str, model: PreTrainedModel | None) -> None:
    """Raise `ValueError` for a model that one rank runs alone but holds only in part. `name`: for the error."""
    ways = {"tensor parallelism": is_spread, "DeepSpeed's ZeRO-3": is_zero3, "FSDP2": is_sharded}
    for way, spreads in ways.items():
        if model is not None and spreads(model):
            raise ValueError(f"the {name} is spread over ranks ({way}), and one rank alone runs it: load it whole")


def find_ranks(model: PreTrainedModel, synced: bool | None) -> RankGroup | None:
    """Return the group of ranks that share the target or its forwards; None: the target is whole. `synced`:
    `synced_gpus` of the call.

    Raises: `ValueError`, one line, for unsupported sharding.
    """
    device, managed = device_of(model), synced is not False and not is_sharded(model)
    if is_zero3(model):
        raise ValueError(
            "the target is sharded by DeepSpeed's ZeRO-3, which lossy_policy does not run: shard it with FSDP2 "
            "(fully_shard), or load it with tp_plan"
        )
    if managed and is_fsdp_managed_module(base_of(model)):
        raise ValueError(
            "the target's weights are spread over ranks by the first FSDP, which lossy_policy does not run: shard it "
            "with FSDP2 (fully_shard), or pass synced_gpus=False where every rank has the same prompts and seed"
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


def check_same_call(ranks: RankGroup, prompts: object, *others: Hashable) -> None:
    """Raise `ValueError`, on every rank, if the ranks of a tensor-parallel target make different calls."""
    if isinstance(ranks, TensorParallelGroup):
        texts = hashlib.sha256(repr(prompts).encode()).hexdigest()
        ranks.agree((texts, *others), "prompts, lengths or policies")


def run_on_leader(target: object, decode: Callable[[], object]) -> object:
    """Return the result of `decode`: with tensor parallelism the first rank shares its result;
    with FSDP2 the ranks run in step."""
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


def run_on_follower(target: object, ranks: TensorParallelGroup) -> object:
    """Run the first rank's forwards on another rank and return its result. Raises: `OtherRankFailed`."""
    assert isinstance(target, RowModel)
    if not follow(target, ranks):
        raise OtherRankFailed("rank 0 ended with an error: see its traceback")
    return _move(ranks.share(None), ranks.device)


def _move(value: object, device: torch.device) -> object:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
