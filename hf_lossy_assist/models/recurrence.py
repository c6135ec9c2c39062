"""Rollback of recurrent states: the forwards since the last settled lengths, and the recurrences of these forwards.

A forward is a `ForwardStep`: it began at `starts[b]` tokens of row b, and `counts[b]` of its tokens were real. A
rolled-back row ends before a step, after it, or within it, between two of its tokens.

Record the recurrences of linear-attention and state-space layers during a forward on a `RowCache`.

The recorded inputs of the tokens that a row keeps are run again, and padding after them has no effect. Each kind has an
idle token, which changes no state: no decay and no write in a gated delta rule (g = β = 0), no time in Mamba (Δ = 0).
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..tensors import on_device
from .introspection import modelling_files
from .patching import Forward, Patch


Arguments = dict[str, Any]
NO_LIMIT = (0.0, torch.inf)
SHORTEST = 16  # chunk of a scan, in tokens
signature_of = functools.cache(inspect.signature)  # cached: few functions, called often


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
        if all(length >= self.width for length in self.prompts):
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
        settled, prompt = (0, 1) if other.settled is None else (other.settled[a], other.prompts[a])
        assert not other.steps and settled == tokens, "a state is that after all tokens"
        self.settled = [*(self.settled or [])[:b], settled, *(self.settled or [])[b + 1 :]]
        self.prompts = [*self.prompts[:b], prompt, *self.prompts[b + 1 :]]

    def find(self, lengths: Sequence[int], device: torch.device) -> list[RestorePoint] | None:
        """Return the sources of the states after `lengths[b]` tokens of each row;
        None: the current states are those."""
        groups: dict[tuple[int | None, str], dict[int, int]] = {}
        for b, length in enumerate(lengths):
            step, where, tokens = self._locate(b, length)
            groups.setdefault((step, where), {})[b] = tokens
        if list(groups) == [(len(self.steps) - 1, "after")]:
            return None
        points = []
        for (step, where), rows in groups.items():
            ends = RowLengths([rows.get(b, 0) for b in range(len(lengths))]) if where == "within" else None
            points.append(RestorePoint(on_device(list(rows), device), step, where == "after", ends))
        return points

    def _locate(self, b: int, length: int) -> tuple[int | None, str, int]:
        """Return the step in which a row's first `length` tokens end (−1: the settled state), where, and after how many
        of its tokens."""
        for index in range(len(self.steps) - 1, -1, -1):
            step = self.steps[index]
            tokens = length - step.starts[b]
            if tokens < 0:
                continue
            if tokens == step.counts[b] and (tokens or step.width > 1):  # a single padding token changes states
                return index, "after", tokens
            if tokens == 0:
                return index, "before", 0
            if tokens < step.counts[b] and step.records:
                return index, "within", tokens
            break
        settled = 0 if self.settled is None else self.settled[b]
        if length == settled:
            return (-1, "after", 0) if not self.steps else (0, "before", 0)
        if length == 0:
            return None, "nothing", 0
        raise AssertionError(f"a recurrent state cannot go back to {length} tokens: row {b} was settled at {settled}")


def with_times(arguments: Arguments, limited: torch.Tensor | None) -> Arguments:
    """Return a Mamba-2 recurrence's arguments with Δ computed; from `dt` alone it could not be 0, as some models have a
    lower limit above 0.

    `limited` (B, Q) bool, None: all: tokens that the limit applies to. Nemotron-H and Zamba 2 apply it in prompts only;
    their steps have none.
    """
    dt, bias = arguments["dt"].float(), arguments.get("dt_bias")
    if bias is not None:
        dt = dt + bias.float()
    if arguments.get("dt_softplus"):
        dt = torch.nn.functional.softplus(dt)
    within = dt.clamp(*arguments.get("dt_limit", NO_LIMIT))
    if limited is not None:
        within = torch.where(limited.to(dt.device).view(*limited.shape, *[1] * (dt.dim() - 2)), within, dt)
    return arguments | {"dt": within, "dt_bias": None, "dt_softplus": False, "dt_limit": NO_LIMIT}


class Form(NamedTuple):
    """The arguments of one kind of recurrence."""

    idle: tuple[str, ...]  # arguments (B, Q, …) that are 0 at an idle token
    initial: str  # argument for the initial state
    # Transforms arguments so that the idle ones may be set to 0; a gated delta rule needs no change.
    ready: Callable[[Arguments, torch.Tensor | None], Arguments] = lambda arguments, limited: dict(arguments)


FORMS = {
    "torch_chunk_gated_delta_rule": Form(("g", "beta"), "initial_state"),
    "chunk_kimi_delta_attention": Form(("g", "beta"), "initial_state"),
    "mamba2_chunk_scan": Form(("dt",), "initial_states", ready=with_times),
}
STEP = "mamba2_selective_state_update"  # has no limit


def recorded_recurrences(base: PreTrainedModel) -> Iterable[Patch]:
    """Yield patches for the recurrences in a model's modelling files."""
    for file in modelling_files(base):
        for name in FORMS:
            if hasattr(file, name):
                yield Patch(file, name, partial(_record, name))
                if hasattr(file, STEP):
                    yield Patch(file, STEP, _limit_time)


@dataclass(frozen=True)
class RecordedCall:
    """A recurrence over a block, (B, Q, …)."""

    name: str
    function: Callable[..., Any]
    arguments: Arguments

    @property
    def form(self) -> Form:
        return FORMS[self.name]

    @property
    def width(self) -> int:
        return int(self.arguments[self.form.idle[0]].shape[1])

    def idle_after(self, tokens: torch.Tensor, limited: torch.Tensor | None = None) -> Arguments:
        """Return arguments that make each row's tokens after its first `tokens[b]`, (B,), idle;
        `limited` as in `with_times`."""
        out = self.form.ready(self.arguments, limited)
        for name in self.form.idle:
            value = out[name]
            after = torch.arange(value.shape[1], device=value.device) >= tokens[:, None].to(value.device)
            out[name] = value.masked_fill(after.view(*after.shape, *[1] * (value.dim() - 2)), 0.0)
        return out

    def again(self, state: torch.Tensor | None, tokens: torch.Tensor, most: int) -> torch.Tensor:
        """Return the state after each row's first `tokens[b]` ≤ `most`, (B,). `state`: that before the block;
        None: there is none yet."""
        cut = {name: value for name, value in self.arguments.items() if name != self.form.initial}
        for name, value in cut.items():
            if isinstance(value, torch.Tensor) and value.dim() > 2 and value.shape[1] == self.width:
                cut[name] = value[:, :most]
        idle = replace(self, arguments=short_chunks(cut, most)).idle_after(tokens)
        return self.function(**idle, **{self.form.initial: state})[1]


def named(function: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> Arguments:
    """Return a call's arguments by name."""
    signature = signature_of(function)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    size = signature.parameters.get("chunk_size")
    if size is not None and size.default is not size.empty:
        bound.setdefault("chunk_size", size.default)
    return bound | bound.pop("kwargs", {})


def short_chunks(arguments: Arguments, width: int) -> Arguments:
    """Return a scan's arguments with a chunk size no larger than `width` tokens need: a block is padded to whole
    chunks, of 64 or 256."""
    size = max(SHORTEST, 1 << (width - 1).bit_length())
    on_cpu = next(value for value in arguments.values() if isinstance(value, torch.Tensor)).device.type == "cpu"
    if on_cpu and width <= 64:  # no kernel here that might need a power of two
        size = width
    return arguments | {"chunk_size": size} if arguments.get("chunk_size", 0) > size else arguments


def _record(name: str, forward: Forward, original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Run a recurrence, and leave the call in the log for the layer that takes its state."""
    log = forward.cache.log
    if log is None:
        return original(*args, **kwargs)
    step = log.steps[-1]
    call = RecordedCall(name, original, short_chunks(named(original, args, kwargs), step.width))
    log.limit = call.arguments.get("dt_limit", NO_LIMIT)
    limited = None if log.limit[0] <= 0 else step.in_prompts()
    if limited is not None or not step.is_even:
        idle = step.ends.on(call.arguments[call.form.idle[0]].device)
        call = replace(call, arguments=call.idle_after(idle, limited))
    log.call = call if step.records else replace(call, arguments={})
    return original(**call.arguments)


def _limit_time(forward: Forward, original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Run a Mamba-2 step; a prompt's last token, when fed alone, gets the minimum Δ that a scan would have applied."""
    log = forward.cache.log
    if log is None or log.limit[0] <= 0:
        return original(*args, **kwargs)
    arguments = named(original, args, kwargs) | {"dt_limit": log.limit}
    ready = with_times(arguments, log.steps[-1].in_prompts())
    return original(**{name: value for name, value in ready.items() if name != "dt_limit"})


@dataclass
class LayerSnapshot:
    """A layer's record of one forward and one of its states, from which rows can be rolled back into the forward."""

    window: torch.Tensor | None  # (B, C, K) before
    state: torch.Tensor | None  # (B, …) before
    inputs: torch.Tensor | None = None  # (B, C, K + Q) of the convolution, with the window in front
    call: RecordedCall | None = None
    window_after: torch.Tensor | None = None
    state_after: torch.Tensor | None = None

    def at(self, point: RestorePoint) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return window and state at a point before, after or within the forward."""
        if point.ends is None:
            if point.after:
                return self.window_after, self.state_after
            return (
                zeros_like(self.window_after) if self.window is None else self.window,
                zeros_like(self.state_after) if self.state is None else self.state,
            )
        window = state = None
        if self.inputs is not None and self.window_after is not None:
            window = point.ends.window(self.inputs, self.window_after.shape[-1])
        if self.state_after is not None:
            assert self.call is not None, "`update_recurrent_state` has asked for it"
            state = self.call.again(self.state, point.ends.on(self.state_after.device), point.ends.most)
            state = state.to(self.state_after.dtype)
        return window, state


def zeros_like(states: torch.Tensor | None) -> torch.Tensor | None:
    """Return zeros shaped like `states`, or None."""
    return None if states is None else torch.zeros_like(states)
