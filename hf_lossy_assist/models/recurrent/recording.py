"""The recurrences of linear attention and state-space layers, recorded while a forward on a `RowCache` runs.

Their inputs are recorded, so that they alone run again over the tokens that a row keeps, and padding after a row's tokens changes nothing.
Transformers has one function of a kind in each modelling file, with kernels of `fla` and `mamba-ssm` behind it where those are installed.
Each has a token that changes no state: a gated delta rule that neither decays nor writes (g = β = 0), a Mamba-2 step of no time (Δ = 0).
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..introspection import modelling_files
from ..patching import Forward, Patch
from .closed_forms import CLOSED_FORMS, SHORT, Arguments, Block, states_after
from .steps import RestorePoint


NO_LIMIT = (0.0, torch.inf)
PACKED_SEQUENCES = ("cu_seqlens", "seq_idx")  # arguments that kernels alone know
signature_of = functools.cache(inspect.signature)  # of few functions, at each call of one


def with_times(arguments: Arguments, limited: torch.Tensor | None) -> Arguments:
    """Return a Mamba-2 recurrence's arguments with Δ itself, not what becomes Δ, which has a lower limit above 0 in some models.

    `limited` (B, Q) bool, None being all: tokens that the limit is for. Nemotron-H and Zamba 2 keep to it in prompts alone: their steps
    have none.
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
    """The arguments of a kind of recurrence."""

    idle: tuple[str, ...]  # arguments (B, Q, …) that are 0 at a token that changes nothing
    initial: str  # the state that it begins with
    # Makes the idle arguments what may be 0: a gated delta rule's may be as they are.
    ready: Callable[[Arguments, torch.Tensor | None], Arguments] = lambda arguments, limited: dict(arguments)


FORMS = {
    "torch_chunk_gated_delta_rule": Form(("g", "beta"), "initial_state"),
    "chunk_kimi_delta_attention": Form(("g", "beta"), "initial_state"),
    "mamba2_chunk_scan": Form(("dt",), "initial_states", ready=with_times),
}
STEP = "mamba2_selective_state_update"  # of no limit


def recorded_recurrences(base: PreTrainedModel) -> Iterable[Patch]:
    """Find the recurrences in a model's modelling files."""
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
        """Return the arguments with which a row's tokens after its first `tokens[b]`, (B,), change nothing; `limited` as in `with_times`."""
        out = self.form.ready(self.arguments, limited)
        for name in self.form.idle:
            given = out[name]
            after = torch.arange(given.shape[1], device=given.device) >= tokens[:, None].to(given.device)
            out[name] = given.masked_fill(after.view(*after.shape, *[1] * (given.dim() - 2)), 0.0)
        return out

    def block(self, state: torch.Tensor | None, like: torch.Tensor) -> Block | None:
        """Return what it did, where its states have a closed form; `like`: what a state looks like."""
        form, meant = CLOSED_FORMS[self.name], {*signature_of(self.function).parameters, *PACKED_SEQUENCES}
        arguments = {name: value for name, value in self.arguments.items() if name in meant}
        if self.width > SHORT or not form.covers(arguments):
            return None
        return Block(form, self.form.ready(self.arguments, None), torch.zeros_like(like) if state is None else state)

    def again(self, state: torch.Tensor | None, tokens: torch.Tensor, most: int) -> torch.Tensor:
        """Return the state after each row's first `tokens[b]`, (B,), no more than `most`. `state`: before the block; None: none yet."""
        cut = {name: value for name, value in self.arguments.items() if name != self.form.initial}
        for name, value in cut.items():
            if isinstance(value, torch.Tensor) and value.dim() > 2 and value.shape[1] == self.width:
                cut[name] = value[:, :most]
        idle = replace(self, arguments=short_chunks(cut, most)).idle_after(tokens)
        return self.function(**idle, **{self.form.initial: state})[1]


def named(function: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> Arguments:
    """Return a call's arguments by their names."""
    signature = signature_of(function)
    found = dict(signature.bind(*args, **kwargs).arguments)
    size = signature.parameters.get("chunk_size")
    if size is not None and size.default is not size.empty:
        found.setdefault("chunk_size", size.default)
    return found | found.pop("kwargs", {})


def short_chunks(arguments: Arguments, width: int) -> Arguments:
    """Return a scan's arguments with chunks no longer than a block of `width` tokens needs: it is padded to whole chunks, of 64 or 256."""
    size = max(SHORT, 1 << (width - 1).bit_length())
    on_cpu = next(value for value in arguments.values() if isinstance(value, torch.Tensor)).device.type == "cpu"
    if on_cpu and width <= 64:  # no kernel, which may want a power of two
        size = width
    return arguments | {"chunk_size": size} if arguments.get("chunk_size", 0) > size else arguments


def _record(name: str, forward: Forward, original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Run a recurrence, and leave its call in the log for the layer that takes its state."""
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
    """Run a Mamba-2 step that gives a prompt's last token, where it is read alone, the least time that a scan would have given it."""
    log = forward.cache.log
    if log is None or log.limit[0] <= 0:
        return original(*args, **kwargs)
    arguments = named(original, args, kwargs) | {"dt_limit": log.limit}
    ready = with_times(arguments, log.steps[-1].in_prompts())
    return original(**{name: value for name, value in ready.items() if name != "dt_limit"})


@dataclass
class LayerSnapshot:
    """A layer's record of one forward and one of its states, so that rows can be rolled back into it."""

    window: torch.Tensor | None  # (B, C, K) before
    state: torch.Tensor | None  # (B, …) before
    inputs: torch.Tensor | None = None  # (B, C, K + Q) of the convolution, the window before them
    call: RecordedCall | None = None
    window_after: torch.Tensor | None = None
    state_after: torch.Tensor | None = None
    found: torch.Tensor | None = None  # the state within the block, from `run_again`

    def at(self, point: RestorePoint) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return window and state before the forward, after it, or within it."""
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
            state, self.found = self.found, None
            if state is None:
                assert self.call is not None, "`update_recurrent_state` has asked for it"
                state = self.call.again(self.state, point.ends.on(self.state_after.device), point.ends.most)
            state = state.to(self.state_after.dtype)
        return window, state


def run_again(steps: Sequence[Sequence[LayerSnapshot]], points: Sequence[RestorePoint] | None) -> None:
    """Find the states of all layers in one go, where rows end within a step. `steps[s]`: what layers recorded of it."""
    for point in points or ():
        if point.ends is None or point.step is None:
            continue
        known: dict[int, Block] = {}
        for number, snapshot in enumerate(steps[point.step]):
            if snapshot.call is not None and snapshot.state_after is not None:
                block = snapshot.call.block(snapshot.state, snapshot.state_after)
                known |= {} if block is None else {number: block}
        for number, state in zip(known, states_after(list(known.values()), point.ends), strict=True):
            steps[point.step][number].found = state


def zeros_like(states: torch.Tensor | None) -> torch.Tensor | None:
    """Return zeros in the place of states, if there are any."""
    return None if states is None else torch.zeros_like(states)
