"""States after a row's first tokens of a short block, without the block's outputs, computed for many layers at once.

With keys kₜ, values vₜ and cumulative log decays aₜ of a block that began in state S, the state after its first n tokens is e^aₙ S + Σ_{t ≤ n}
e^(aₙ − aₜ) kₜ vₜᵀ: what a token writes does not depend on later tokens. Mamba-2's keys are Δₜ xₜ. A delta rule writes β (v − the value that the
state holds for k), found for all tokens by one triangular system. So a mask lets rows keep different numbers
of tokens, and layers are stacked into one batch: on a CPU the time depends on the number of operations, not on their size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .steps import RowLengths


SHORT = 16  # tokens of a block: the system and Kimi's decays grow quadratically
NUMBERS = 1 << 24  # limit on the elements stacked at once; larger states take long enough for separate operations
Arguments = dict[str, Any]


class Written(NamedTuple):
    """Keys, values and decays written by the tokens of a block."""

    keys: torch.Tensor  # (B, H, Q, K)
    values: torch.Tensor  # (B, H, Q, V)
    decay: torch.Tensor  # (B, H, Q, K or 1), log decay of each token

    def after(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the state (B, H, K, V) after each row's first `tokens[b]`, (B,) int64. `state`: that before the block; it is overwritten."""
        places = torch.arange(self.decay.shape[2], device=state.device)
        forgotten = (places >= tokens[:, None])[:, None, :, None]
        # Sums from the end rather than differences of sums: a token's small decay would be lost beside large ones before it.
        sums = self.decay.masked_fill(forgotten, 0.0).flip(2).cumsum(dim=2).flip(2)
        left = torch.nn.functional.pad(sums[:, :, 1:], (0, 0, 0, 1)).masked_fill(forgotten, -torch.inf).exp()
        written = (self.keys * left).transpose(2, 3)
        state *= sums[:, :, :1].exp().transpose(2, 3)
        return state.flatten(0, 1).baddbmm_(written.flatten(0, 1), self.values.flatten(0, 1)).view_as(state)


def _delta_rule(arguments: Arguments, state: torch.Tensor) -> Written:
    """Return the writes of a gated delta rule with a decay per head, `g` (B, Q, H), or per channel, (B, Q, H, K) as in Kimi."""
    keys, values, decay = (arguments[name].transpose(1, 2).float() for name in ("key", "value", "g"))
    if arguments["use_qk_l2norm_in_kernel"]:
        keys = keys * torch.rsqrt(keys.square().sum(dim=-1, keepdim=True) + 1e-6)
    if keys.shape[1] != values.shape[1]:
        keys = keys.repeat_interleave(values.shape[1] // keys.shape[1], dim=1)
    beta = arguments["beta"].transpose(1, 2).float()[..., None]
    by_channel = decay.dim() == 4
    decay = decay if by_channel else decay[..., None]
    every = torch.ones(decay.shape[2], decay.shape[2], dtype=torch.bool, device=state.device)
    between = decay[:, :, :, None].masked_fill(every.triu()[..., None], 0.0).cumsum(dim=2)  # (B, H, Q, Q, K or 1)
    # The decay from each earlier token to each token.
    between = between.masked_fill(every.triu(1)[..., None], -torch.inf).exp()
    weighted = keys * beta
    if by_channel:
        system = (weighted[:, :, :, None] * keys[:, :, None] * between).sum(dim=-1)
    else:
        system = (weighted @ keys.transpose(2, 3)) * between[..., 0]
    missing = values * beta - (weighted * decay.cumsum(dim=2).exp()) @ state
    return Written(keys, torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True), decay)


def _mamba2(arguments: Arguments, state: torch.Tensor) -> Written:
    """Return the writes of a Mamba-2 scan whose `dt` (B, Q, H) is Δ itself."""
    times = arguments["dt"].float()
    heads = arguments["hidden_states"].float().transpose(1, 2)
    written = arguments["B"].float().transpose(1, 2)
    written = written.repeat_interleave(heads.shape[1] // written.shape[1], dim=1)
    decay = (arguments["A"].float() * times).transpose(1, 2)[..., None]
    return Written(heads * times.transpose(1, 2)[..., None], written, decay)


class ClosedForm(NamedTuple):
    """Closed form of one kind of recurrence."""

    writes: Callable[[Arguments, torch.Tensor], Written]
    by_token: tuple[str, ...]  # arguments (B, Q, …)
    of_layer: tuple[str, ...]  # arguments (H,)
    flags: tuple[str, ...]
    others: frozenset[str]  # arguments that do not affect the state

    def covers(self, arguments: Arguments) -> bool:
        """Return whether the closed form accounts for all of these arguments."""
        needed = {*self.by_token, *self.of_layer}
        more = [value for name, value in arguments.items() if name not in needed | {*self.flags} | self.others]
        return needed <= arguments.keys() and not any(isinstance(value, torch.Tensor) or value for value in more)


_DELTA = ClosedForm(
    _delta_rule,
    ("key", "value", "g", "beta"),
    (),
    ("use_qk_l2norm_in_kernel",),
    frozenset({"query", "chunk_size", "output_final_state", "initial_state"}),
)
CLOSED_FORMS = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": ClosedForm(
        _mamba2, ("hidden_states", "dt", "B"), ("A",), (),
        frozenset({"C", "D", "z", "chunk_size", "dt_bias", "dt_softplus", "dt_limit", "return_final_states", "initial_states"}),
    ),
}  # fmt: skip


class Block(NamedTuple):
    """A block of one layer, with a closed form that covers its arguments."""

    form: ClosedForm
    arguments: Arguments  # with Δ computed
    state: torch.Tensor  # (B, H, K, V)

    @property
    def shape(self) -> tuple[object, ...]:
        """Return the properties that stacked blocks must share."""
        tensors = [self.arguments[name] for name in (*self.form.by_token, *self.form.of_layer)] + [self.state]
        flags = tuple(bool(self.arguments.get(name)) for name in self.form.flags)
        return (self.form.writes, flags, *((each.shape, each.dtype, each.device) for each in tensors))


def states_after(blocks: Sequence[Block], ends: RowLengths) -> list[torch.Tensor]:
    """Return the state after each row's first tokens for each block, in float32."""
    out: dict[int, torch.Tensor] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, block in enumerate(blocks):
        groups.setdefault(block.shape, []).append(number)
    for group in groups.values():
        at_once = max(1, NUMBERS // max(1, blocks[group[0]].state.numel()))
        for start in range(0, len(group), at_once):
            numbers = group[start : start + at_once]
            out |= zip(numbers, _stacked([blocks[n] for n in numbers], ends), strict=True)
    return [out[number] for number in range(len(blocks))]


def _stacked(blocks: Sequence[Block], ends: RowLengths) -> tuple[torch.Tensor, ...]:
    form, rows = blocks[0].form, len(blocks[0].state)
    many: Arguments = {name: bool(blocks[0].arguments.get(name)) for name in form.flags}
    for name in form.by_token:
        many[name] = torch.cat([block.arguments[name] for block in blocks])
    for name in form.of_layer:  # (layers · B, 1, H)
        each = torch.stack([block.arguments[name] for block in blocks])
        many[name] = each.repeat_interleave(rows, dim=0)[:, None]
    state = torch.cat([block.state for block in blocks]).float()
    written = form.writes(many, state)
    return written.after(state, ends.on(state.device).repeat(len(blocks))).chunk(len(blocks))
