"""A target whose weights are spread over ranks: the first rank decodes, and the others compute what it computes.

Nothing but the target is run by more than one rank. What the first one drafts, draws and decides the others never see, so they cannot decide
otherwise; what it feeds to the target they feed, told in one small broadcast a forward.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .introspection import base_of
from .row_model import RowModel


FEED, SELECT, END, FAILED = range(4)
WORDS = 1024  # of a message; what is longer comes in two
CHECKED = "HF_LOSSY_CHECK_RANKS"  # in the environment: compare the logits of all ranks after each forward


class OtherRankFailed(RuntimeError):
    """Another of the ranks that compute one target together ended with an error."""


class Diverged(RuntimeError):
    """Ranks computed different logits from the same tokens."""


class Ranks:
    """The ranks that share one target, and what the first tells the others."""

    def __init__(self, device: torch.device):
        self.device = device
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.checks = bool(os.environ.get(CHECKED))
        self.met = False  # whether all have made this call

    @classmethod
    def of(cls, model: Any, device: torch.device) -> "Ranks | None":
        """Those of a target that tensor parallelism spreads over all processes; None: it is whole."""
        return cls(device) if is_spread(model) else None

    @property
    def leads(self) -> bool:
        """Whether this is the first."""
        return self.rank == 0

    def row_model(self, *size: Any) -> RowModel:
        """This rank's part of the target on a cache of rows. Takes `RowModel`'s arguments."""
        out = LedModel(*size, ranks=self) if self.leads else RowModel(*size)
        out.packs = False  # which each rank would have to decide alike
        return out

    def fail(self) -> None:
        """Tell the others, which are here or come here, that this rank's call ended before it began."""
        self._gathered(None)

    def agree(self, what: Any, name: str) -> None:
        """Refuse a call that is not the same on all ranks. Raises: `ValueError` on each of them; `OtherRankFailed`."""
        self.met = True
        said = self._gathered(what)
        if None in said:
            raise OtherRankFailed("another rank of this target ended with an error, which it tells of itself")
        if any(its != said[0] for its in said):
            raise ValueError(f"{name} differ between the ranks of one target: every rank must make the same call")

    def _gathered(self, what: Any) -> list[Any]:
        said: list[Any] = [None] * self.count
        dist.all_gather_object(said, what)
        return said

    def share(self, value: Any) -> Any:
        """The first rank's `value`, on all."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def tell(self, words: Sequence[int]) -> None:
        """Say whole numbers to the others."""
        message = torch.zeros(WORDS, dtype=torch.int64)
        message[0] = len(words)
        first = words[: WORDS - 1]
        message[1 : 1 + len(first)] = torch.tensor(first, dtype=torch.int64)
        dist.broadcast(message.to(self.device), src=0)
        if len(words) > len(first):
            dist.broadcast(torch.tensor(words[len(first) :], dtype=torch.int64, device=self.device), src=0)

    def hear(self) -> list[int]:
        """What the first rank has said."""
        message = torch.zeros(WORDS, dtype=torch.int64, device=self.device)
        dist.broadcast(message, src=0)
        count, *words = message.tolist()
        if count > len(words):
            rest = torch.zeros(count - len(words), dtype=torch.int64, device=self.device)
            dist.broadcast(rest, src=0)
            words += rest.tolist()
        return words[:count]

    def check(self, logits: torch.Tensor) -> None:
        """Compare logits, where the environment asks for it. Raises: `Diverged`, on all ranks."""
        if not self.checks or not logits.numel():  # a prefill needs none
            return
        flat = logits.detach().reshape(-1).float().nan_to_num()
        mine = torch.stack([flat.sum(), flat.abs().sum(), flat.argmax().float()]).to(self.device)
        first = mine.clone()
        dist.broadcast(first, src=0)
        others = torch.zeros(self.count, device=self.device)
        others[self.rank] = float(not torch.equal(mine, first))
        dist.all_reduce(others)
        if others.any():
            raise Diverged(f"ranks {others.nonzero()[:, 0].tolist()} computed other logits than rank 0")


class LedModel(RowModel):
    """The target on the first rank."""

    def __init__(self, *args: Any, ranks: Ranks, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.ranks, self._told = ranks, False
        self.broken = False  # a forward failed here, in the middle of which the others may be

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        if self._told:  # a feed within a feed
            return super().feed(tokens, counts, keep)
        rows, width = tokens.shape
        head = [FEED, rows, width, -1 if keep is None else keep]
        self.ranks.tell([*head, *self.lengths, *counts, *tokens.reshape(-1).tolist()])
        self._told = True
        try:
            logits = super().feed(tokens, counts, keep)
        except BaseException:
            self.broken = True
            raise
        finally:
            self._told = False
        try:
            self.ranks.check(logits)
        except Diverged:
            self.broken = True  # as all know
            raise
        return logits

    def select(self, rows: Sequence[int]) -> None:
        self.ranks.tell([SELECT, *rows])
        super().select(rows)

    def export(self, rows: int, mask: torch.Tensor | None) -> None:
        """None: each rank holds a part of it."""


def follow(model: RowModel, ranks: Ranks) -> bool:
    """Compute what the first rank computes, until its call is over; False: it ended with an error."""
    while True:
        what, *words = ranks.hear()
        if what in (END, FAILED):
            return what == END
        if what == SELECT:
            model.select(words)
            continue
        rows, width, keep = words[:3]
        numbers = iter(words[3:])
        lengths, counts = ([next(numbers) for _ in range(rows)] for _ in range(2))
        tokens = torch.tensor(list(numbers), dtype=torch.int64).view(rows, width)
        model.rollback(lengths)
        ranks.check(model.feed(tokens, counts, None if keep < 0 else keep))


def is_spread(model: Any) -> bool:
    """Whether tensor parallelism spreads a model's weights over processes."""
    size = getattr(base_of(model), "tp_size", None)
    return size is not None and size > 1
