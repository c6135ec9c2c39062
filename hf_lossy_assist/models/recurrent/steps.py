"""The forwards since the last settled lengths, from which recurrent states and windows are restored row by row.

A forward is a `ForwardStep`: it began at `starts[b]` tokens of row b, and `counts[b]` of its tokens were real. A rolled-back row ends before a
step, after it, or within it, between two of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...uploads import on_device


class RowLengths:
    """Number of a block's tokens that each row keeps, with derived tensors computed once for all layers."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens, self.most = tokens, max(tokens, default=0)
        self._known: dict[object, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:  # (B,) int64
        if device not in self._known:
            self._known[device] = on_device(self.tokens, device)
        return self._known[device]

    def window(self, inputs: torch.Tensor, size: int) -> torch.Tensor:
        """Return the `size` positions of `inputs` (B, C, size + Q) that end with each row's last kept token."""
        first = self.tokens[0]
        if all(tokens == first for tokens in self.tokens):
            return inputs[..., first : first + size].clone()
        key = inputs.device, size
        if key not in self._known:
            self._known[key] = self.on(inputs.device)[:, None, None] + torch.arange(size, device=inputs.device)
        return inputs.gather(2, self._known[key].expand(-1, inputs.shape[1], -1))


@dataclass(frozen=True)
class ForwardStep:
    """One forward."""

    starts: Sequence[int]
    counts: Sequence[int]
    width: int
    records: bool  # whether states between its tokens can be restored
    prompts: Sequence[int]  # the first `prompts[b]` of row b's tokens belong to its prompt
    ends: RowLengths  # of the real tokens

    @property
    def is_even(self) -> bool:
        """Return whether all its tokens are real."""
        return all(count == self.width for count in self.counts)

    def in_prompts(self) -> torch.Tensor | None:
        """Return which tokens belong to a prompt, (B, Q) bool; None: all do."""
        if all(number >= self.width for number in self.prompts):
            return None
        return torch.arange(self.width) < torch.tensor(self.prompts)[:, None]


@dataclass(frozen=True)
class RestorePoint:
    """Where some rows' states come from: step number `step`, or None for empty rows."""

    rows: torch.Tensor  # (R,) int64
    step: int | None
    after: bool = False  # after the step, else before it
    ends: RowLengths | None = None  # within the step: how many of its tokens to keep, 0 for other rows


@dataclass
class StepLog:
    """The steps since the last settled lengths, shared by all layers of a cache."""

    # Settled tokens of each row; None: no row has any, and their number is that of the first step.
    settled: list[int] | None = None
    prompts: list[int] = field(default_factory=list)  # length of each row's prompt, as far as it was read
    steps: list[ForwardStep] = field(default_factory=list)
    limit: tuple[float, float] = (0.0, 0.0)  # on Δ in the last Mamba-2 scan
    call: Any = None  # of the latest recurrence, until a layer takes it

    def open(self, starts: Sequence[int], counts: Sequence[int], width: int, records: bool) -> ForwardStep:
        """Begin a forward. If `records` is False, its tokens are those of prompts except their last one."""
        if self.settled is None:
            self.settled, self.prompts = [0] * len(starts), [1] * len(starts)
        if not records:
            self.prompts = [start + count + 1 for start, count in zip(starts, counts, strict=True)]
        prompts = [max(end - start, 0) for end, start in zip(self.prompts, starts, strict=True)]
        self.steps.append(ForwardStep(list(starts), list(counts), width, records, prompts, RowLengths(list(counts))))
        return self.steps[-1]

    def settle(self, lengths: Sequence[int]) -> None:
        """Set the settled lengths and drop the steps."""
        self.settled, self.steps, self.call = list(lengths), [], None

    def copy_from(self, rows: Sequence[int], other: "StepLog") -> None:
        """Take over these rows of `other`."""
        if other.settled is not None:
            self.settled, self.prompts = [other.settled[b] for b in rows], [other.prompts[b] for b in rows]

    def copy_row(self, b: int, other: "StepLog", a: int, tokens: int) -> None:
        """Set row b, which may be a new one, to row a of `other`, all of whose `tokens` are copied."""
        held, prompt = (0, 1) if other.settled is None else (other.settled[a], other.prompts[a])
        assert not other.steps and held == tokens, "a state is that after all tokens"
        self.settled = [*(self.settled or [])[:b], held, *(self.settled or [])[b + 1 :]]
        self.prompts = [*self.prompts[:b], prompt, *self.prompts[b + 1 :]]

    def find(self, lengths: Sequence[int], device: torch.device) -> list[RestorePoint] | None:
        """Return the sources of the states after `lengths[b]` tokens of each row; None: the current states are those."""
        groups: dict[tuple[int | None, str], dict[int, int]] = {}
        for b, length in enumerate(lengths):
            step, where, tokens = self._locate(b, length)
            groups.setdefault((step, where), {})[b] = tokens
        if list(groups) == [(len(self.steps) - 1, "after")]:
            return None
        found = []
        for (step, where), rows in groups.items():
            ends = RowLengths([rows.get(b, 0) for b in range(len(lengths))]) if where == "within" else None
            found.append(RestorePoint(on_device(list(rows), device), step, where == "after", ends))
        return found

    def _locate(self, b: int, length: int) -> tuple[int | None, str, int]:
        """Return the step in which a row's first `length` tokens end (−1: the settled state), where, and after how many of its tokens."""
        for number in range(len(self.steps) - 1, -1, -1):
            step = self.steps[number]
            tokens = length - step.starts[b]
            if tokens < 0:
                continue
            if tokens == step.counts[b] and (tokens or step.width > 1):  # a single padding token changes states
                return number, "after", tokens
            if tokens == 0:
                return number, "before", 0
            if tokens < step.counts[b] and step.records:
                return number, "within", tokens
            break
        held = 0 if self.settled is None else self.settled[b]
        if length == held:
            return (-1, "after", 0) if not self.steps else (0, "before", 0)
        if length == 0:
            return None, "nothing", 0
        raise AssertionError(f"a recurrent state cannot go back to {length} tokens: row {b} was settled at {held}")
