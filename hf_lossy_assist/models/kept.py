"""What a layer keeps of a forward so that rows can be rolled back into it: the inputs of its recurrence and of its convolution."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .closed_forms import states_behind
from .history import Source
from .recurrence import Call


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
