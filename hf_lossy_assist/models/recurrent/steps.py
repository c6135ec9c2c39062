"""Where the rows of a batch stand in the forwards that ran since they were last settled: what cannot be overwritten, such as the
state of a recurrence, must be found again for each row.

A forward is a `Step`: it began at `starts[b]` tokens of row b and `counts[b]` of its tokens were real. A row that is rolled back ends
somewhere in a step: before it, behind it, or between two of its tokens.


What a layer keeps of a forward so that rows can be rolled back into it: the inputs of its recurrence and of its convolution."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch


class Ends:
    """Behind how many of a block's tokens each row ends. For all layers: on a device, and as places of a window, once."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens, self.most = tokens, max(tokens, default=0)
        self._known: dict[Any, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """(B,) int64."""
        if device not in self._known:
            self._known[device] = torch.tensor(self.tokens, device=device)
        return self._known[device]

    def window(self, inputs: torch.Tensor, size: int) -> torch.Tensor:
        """Of `inputs` (B, C, size + Q), the `size` places that end behind each row's tokens."""
        first = self.tokens[0]
        if all(tokens == first for tokens in self.tokens):
            return inputs[..., first : first + size].clone()
        key = inputs.device, size
        if key not in self._known:
            self._known[key] = self.on(inputs.device)[:, None, None] + torch.arange(size, device=inputs.device)
        return inputs.gather(2, self._known[key].expand(-1, inputs.shape[1], -1))


@dataclass(frozen=True)
class Step:
    """One forward."""

    starts: Sequence[int]
    counts: Sequence[int]
    width: int
    keeps: bool  # what its tokens left between them is kept: rows may come to end there
    prompts: Sequence[int]  # of row b the first so many tokens are its prompt's
    ends: Ends  # of the real tokens

    @property
    def is_even(self) -> bool:
        """Whether all its tokens are real."""
        return all(count == self.width for count in self.counts)

    def of_prompts(self) -> torch.Tensor | None:
        """Which tokens are a prompt's, (B, Q) bool; None: all are."""
        if all(number >= self.width for number in self.prompts):
            return None
        return torch.arange(self.width) < torch.tensor(self.prompts)[:, None]


@dataclass(frozen=True)
class Source:
    """What some rows' states are taken from: of step number `step`, or of none: those rows hold nothing."""

    rows: torch.Tensor  # (R,) int64
    step: int | None
    behind: bool = False  # behind the step, else before it
    ends: Ends | None = None  # behind so many of its tokens; of other rows behind none


@dataclass
class History:
    """The steps since rows were last settled. One for all layers of a cache."""

    modules: Sequence[Any] = ()  # Python modules whose recurrences are looked into
    settled: list[int] | None = (
        None  # tokens of each row that stay; None: as many rows as the first step has, and nothing in them
    )
    prompts: list[int] = field(default_factory=list)  # how long each row's prompt is, as far as it was read
    steps: list[Step] = field(default_factory=list)
    limit: tuple[float, float] = (0.0, 0.0)  # of the times of a Mamba-2 scan, the last one's
    call: Any = None  # of the recurrence that ran last in this forward, and was claimed by no layer yet

    def open(self, starts: Sequence[int], counts: Sequence[int], width: int, keeps: bool) -> Step:
        """A forward is about to run. Where `keeps` is False its tokens are a prompt's, all but the last one of it."""
        if self.settled is None:
            self.settled, self.prompts = [0] * len(starts), [1] * len(starts)
        if not keeps:
            self.prompts = [start + count + 1 for start, count in zip(starts, counts, strict=True)]
        prompts = [max(end - start, 0) for end, start in zip(self.prompts, starts, strict=True)]
        self.steps.append(Step(list(starts), list(counts), width, keeps, prompts, Ends(list(counts))))
        return self.steps[-1]

    def close(self, lengths: Sequence[int]) -> None:
        """These tokens stay, and steps are forgotten."""
        self.settled, self.steps, self.call = list(lengths), [], None

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only."""
        if self.settled is not None:
            self.settled, self.prompts = [self.settled[b] for b in rows], [self.prompts[b] for b in rows]

    def be_rows(self, rows: Sequence[int], other: "History") -> None:
        """Know these rows of `other`."""
        self.settled, self.prompts = other.settled, other.prompts
        self.select(rows)

    def take(self, b: int, other: "History", a: int, tokens: int) -> None:
        """Row b, which may be one more, is row a of `other`, of which all `tokens` are copied."""
        held, prompt = (0, 1) if other.settled is None else (other.settled[a], other.prompts[a])
        assert not other.steps and held == tokens, "a state is that behind all tokens"
        self.settled = [*(self.settled or [])[:b], held, *(self.settled or [])[b + 1 :]]
        self.prompts = [*self.prompts[:b], prompt, *self.prompts[b + 1 :]]

    def find(self, lengths: Sequence[int], device: torch.device) -> list[Source] | None:
        """Where the states behind `lengths[b]` tokens of each row are; None: behind the last step, or where all was settled."""
        places = [self._place(b, length) for b, length in enumerate(lengths)]
        last = len(self.steps) - 1
        if all(step == last and where == "behind" for step, where, _ in places):
            return None
        groups: dict[tuple[int | None, str], list[int]] = {}
        for b, (step, where, _) in enumerate(places):
            groups.setdefault((step, where), []).append(b)
        found = []
        for (step, where), rows in groups.items():
            ends = None
            if where == "between":
                ends = Ends([places[b][2] if b in rows else 0 for b in range(len(places))])
            found.append(Source(torch.tensor(rows, device=device), step, where == "behind", ends))
        return found

    def _place(self, b: int, length: int) -> tuple[int | None, str, int]:
        """The step in which a row's first `length` tokens end, where, and behind how many of its tokens. −1 is where all was settled."""
        for number in range(len(self.steps) - 1, -1, -1):
            step = self.steps[number]
            tokens = length - step.starts[b]
            if tokens < 0:
                continue
            if tokens == step.counts[b] and (tokens or step.width > 1):  # a lone token that is not real changes states
                return number, "behind", tokens
            if tokens == 0:
                return number, "before", 0
            if tokens < step.counts[b] and step.keeps:
                return number, "between", tokens
            break
        held = 0 if self.settled is None else self.settled[b]
        if length == held:
            return (-1, "behind", 0) if not self.steps else (0, "before", 0)
        if length == 0:
            return None, "nothing", 0
        raise AssertionError(f"a recurrent state cannot go back to {length} tokens: row {b} was settled at {held}")


_history: ContextVar[History | None] = ContextVar("history", default=None)  # of the forward under way in this thread


def history() -> History | None:
    """That of the forward under way in this thread."""
    return _history.get()


@contextmanager
def under_way(its: History) -> Iterator[None]:
    """A forward of the cache of `its` runs here."""
    token = _history.set(its)
    try:
        yield
    finally:
        _history.reset(token)
