"""The recurrences of linear attention and state-space layers, looked into while a forward on a `RowCache` runs: their inputs are kept, so
that they alone run again over the tokens that a row keeps, and tokens behind a row's own change nothing.

Transformers has one function of a kind in each modelling file, with kernels of `fla` and `mamba-ssm` behind it where those are installed.
Every one has a token that changes no state: a gated delta rule that neither decays nor writes (g = β = 0), a Mamba-2 step of no time (Δ = 0).
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..quirks.patching import ScopedPatch
from .closed_forms import CLOSED_FORMS, SHORT, Block, states_behind
from .steps import History, Source, history, under_way


Ready = Callable[[dict[str, Any], torch.Tensor | None], dict[str, Any]]


def as_is(arguments: dict[str, Any], limited: torch.Tensor | None) -> dict[str, Any]:
    """A copy: a gated delta rule's own arguments may be 0."""
    return dict(arguments)


def with_times(arguments: dict[str, Any], limited: torch.Tensor | None) -> dict[str, Any]:
    """A Mamba-2 recurrence that is handed Δ itself and not what becomes Δ, which has a lower limit above 0 in some models.

    `limited` (B, Q) bool, None being all: tokens that the limit is for. Nemotron-H and Zamba 2 keep to it in prompts alone: a step of theirs
    knows of none.
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


NO_LIMIT = (0.0, torch.inf)


class Form(NamedTuple):
    """How a kind of recurrence is called."""

    idle: tuple[str, ...]  # arguments (B, Q, …) that are 0 at a token that changes nothing
    initial: str  # the state that it begins with
    ready: Ready = as_is  # makes the idle arguments what may be 0


FORMS = {
    "torch_chunk_gated_delta_rule": Form(("g", "beta"), "initial_state"),
    "chunk_kimi_delta_attention": Form(("g", "beta"), "initial_state"),
    "mamba2_chunk_scan": Form(("dt",), "initial_states", ready=with_times),
}


signature_of = functools.cache(inspect.signature)  # of few functions, at each call of one
PACKED = ("cu_seqlens", "seq_idx")  # what kernels alone know


def named(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by their names."""
    signature = signature_of(function)
    found = dict(signature.bind(*args, **kwargs).arguments)
    size = signature.parameters.get("chunk_size")
    if size is not None and size.default is not size.empty:
        found.setdefault("chunk_size", size.default)
    return found | found.pop("kwargs", {})


def short_chunks(arguments: dict[str, Any], width: int) -> dict[str, Any]:
    """A scan whose chunks are no longer than a block of `width` tokens needs: a block is padded to whole chunks, of 64 or 256 tokens."""
    size = max(SHORT, 1 << (width - 1).bit_length())
    on_cpu = next(its for its in arguments.values() if isinstance(its, torch.Tensor)).device.type == "cpu"
    if on_cpu and width <= 64:  # no kernel, which may want a power of two
        size = width
    return arguments | {"chunk_size": size} if arguments.get("chunk_size", 0) > size else arguments


@dataclass(frozen=True)
class Recurrence:
    """One function of a modelling file."""

    name: str
    function: Callable[..., Any]

    @property
    def form(self) -> Form:
        return FORMS[self.name]

    def idle_behind(
        self, arguments: dict[str, Any], tokens: torch.Tensor, limited: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """The arguments with which a row's tokens behind its first `tokens[b]`, (B,), change nothing; `limited` as in `with_times`."""
        out = self.form.ready(arguments, limited)
        for name in self.form.idle:
            given = out[name]
            behind = torch.arange(given.shape[1], device=given.device) >= tokens[:, None].to(given.device)
            out[name] = given.masked_fill(behind.view(*behind.shape, *[1] * (given.dim() - 2)), 0.0)
        return out


@dataclass(frozen=True)
class Call:
    """A recurrence over a block, (B, Q, …)."""

    recurrence: Recurrence
    arguments: dict[str, Any]

    @property
    def width(self) -> int:
        """Of the block, tokens."""
        return int(self.arguments[self.recurrence.form.idle[0]].shape[1])

    def block(self, state: torch.Tensor | None, like: torch.Tensor) -> Block | None:
        """What it did, where its states have a closed form; `like`: what a state looks like."""
        form, meant = CLOSED_FORMS[self.recurrence.name], {*signature_of(self.recurrence.function).parameters, *PACKED}
        if self.width > SHORT or not form.may({name: its for name, its in self.arguments.items() if name in meant}):
            return None
        arguments = self.recurrence.form.ready(self.arguments, None)
        return Block(form, arguments, torch.zeros_like(like) if state is None else state)

    def again(self, state: torch.Tensor | None, tokens: torch.Tensor, most: int) -> torch.Tensor:
        """The state behind each row's first `tokens[b]`, (B,), no more than `most`. `state`: before the block; None: none yet."""
        cut = {
            name: value[:, :most]
            if isinstance(value, torch.Tensor) and value.dim() > 2 and value.shape[1] == self.width
            else value
            for name, value in self.arguments.items()
            if name != self.recurrence.form.initial
        }
        idle = self.recurrence.idle_behind(short_chunks(cut, most), tokens)
        return self.recurrence.function(**idle, **{self.recurrence.form.initial: state})[1]


def _watched(its: Recurrence) -> Callable[..., Any]:
    """The function, and within a forward on a `RowCache` its call."""

    @functools.wraps(its.function)
    def run(*args: Any, **kwargs: Any) -> Any:
        now = history()
        if now is None:  # another thread's
            return its.function(*args, **kwargs)
        step = now.steps[-1]
        arguments = short_chunks(named(its.function, args, kwargs), step.width)
        now.limit = arguments.get("dt_limit", NO_LIMIT)
        limited = None if now.limit[0] <= 0 else step.of_prompts()
        if limited is not None or not step.is_even:
            arguments = its.idle_behind(arguments, step.ends.on(arguments[its.form.idle[0]].device), limited)
        now.call = Call(its, arguments if step.keeps else {})
        return its.function(**arguments)

    return run


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Mamba-2 step that gives a prompt's last token, where it is read alone, the least time that a scan would have given it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        now = history()
        if now is None or now.limit[0] <= 0:
            return function(*args, **kwargs)
        arguments, limited = named(function, args, kwargs), now.steps[-1].of_prompts()
        ready = with_times(arguments | {"dt_limit": now.limit}, limited)
        return function(**{name: value for name, value in ready.items() if name != "dt_limit"})

    return run


STEP = "mamba2_selective_state_update"  # of no limit


def modules_of(base: Any) -> list[Any]:
    """The modelling files of a model's parts that have a recurrence."""
    files = {sys.modules[type(part).__module__] for part in base.modules()}
    return [its for its in files if any(hasattr(its, name) for name in FORMS)]


def _looked_into(module: Any) -> dict[str, Any]:
    found = {name: getattr(module, name) for name in (*FORMS, STEP) if hasattr(module, name)}
    return {name: _limited(its) if name == STEP else _watched(Recurrence(name, its)) for name, its in found.items()}


_looking = ScopedPatch(_looked_into)


@contextmanager
def recorded(now: History) -> Iterator[None]:
    """A forward runs here whose recurrences are looked into."""
    with _looking.within(now.modules), under_way(now):
        yield


@dataclass
class Kept:
    """Of one forward and one of a layer's states: what it began with, what it read, what it left."""

    window: torch.Tensor | None  # (B, C, K) before
    state: torch.Tensor | None  # (B, …) before
    inputs: torch.Tensor | None = None  # (B, C, K + Q) of the convolution, the window before them
    call: Call | None = None
    window_behind: torch.Tensor | None = None
    state_behind: torch.Tensor | None = None
    again: torch.Tensor | None = None  # the state behind some of each row's tokens, where `run_again` has found it

    def at(self, source: Source) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Window and state before the forward, behind it, or behind some of each row's tokens."""
        if source.ends is None:
            if source.behind:
                return self.window_behind, self.state_behind
            return (
                zeros_like(self.window_behind) if self.window is None else self.window,
                zeros_like(self.state_behind) if self.state is None else self.state,
            )
        window = state = None
        if self.inputs is not None and self.window_behind is not None:
            window = source.ends.window(self.inputs, self.window_behind.shape[-1])
        if self.state_behind is not None:
            state, self.again = self.again, None
            if state is None:
                assert self.call is not None, "`update_recurrent_state` has asked for it"
                state = self.call.again(self.state, source.ends.on(self.state_behind.device), source.ends.most)
            state = state.to(self.state_behind.dtype)
        return window, state


def run_again(steps: Sequence[Sequence[Kept]], found: Sequence[Source] | None) -> None:
    """Find the states of all layers together, where rows come to end between a step's tokens. `steps[s]`: what layers kept of it."""
    for source in found or ():
        if source.ends is None or source.step is None:
            continue
        known = []
        for kept in steps[source.step]:
            if kept.call is None or kept.state_behind is None:
                continue
            block = kept.call.block(kept.state, kept.state_behind)
            if block is not None:
                known.append((kept, block))
        states = states_behind([block for _, block in known], source.ends)
        for (kept, _), state in zip(known, states, strict=True):
            kept.again = state


def joined(parts: Sequence[torch.Tensor | None], found: Sequence[Source]) -> torch.Tensor | None:
    """Of each source's rows what it gives, (B, …)."""
    first = parts[0]
    if first is None or len(parts) == 1:
        return first
    out = first.clone()
    for part, source in zip(parts[1:], found[1:], strict=True):
        assert part is not None, "one layer's states are all there, or none"
        rows = source.rows.to(out.device)
        out[rows] = part[rows]
    return out


def zeros_like(states: torch.Tensor | None) -> torch.Tensor | None:
    """Zeros in the place of states, if there are any."""
    return None if states is None else torch.zeros_like(states)
