"""The state behind a row's first tokens of a short block, without the block's outputs, of many layers at once.

With the keys kₜ, values vₜ and decays aₜ (in logs, summed up to token t) of a block that began in the state S, the state behind its
first n tokens is e^aₙ S + Σ_{t ≤ n} e^(aₙ − aₜ) kₜ vₜᵀ: what a token writes does not depend on the tokens behind it. Mamba-2's keys are
Δₜ xₜ. A delta rule writes β (v − what the state holds under k already), which a triangular system gives of all tokens together. So rows
keep different numbers of tokens by a mask, and layers stand side by side in one batch: on a CPU a round waits for the number of
operations, not for their size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .steps import Ends


SHORT = 16  # tokens of a block: the system and Kimi's decays grow with the square
NUMBERS = 1 << 24  # of the states that stand side by side at once; more than that pays for operations of its own
Arguments = dict[str, Any]


class Written(NamedTuple):
    """What the tokens of a block write."""

    keys: torch.Tensor  # (B, H, Q, K)
    values: torch.Tensor  # (B, H, Q, V)
    decay: torch.Tensor  # (B, H, Q, K or 1), in logs, of each token

    def behind(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The state (B, H, K, V) behind each row's first `tokens[b]`, (B,) int64. `state`: before the block, and overwritten."""
        places = torch.arange(self.decay.shape[2], device=state.device)
        forgotten = (places >= tokens[:, None])[:, None, :, None]
        # Sums from the end, no differences of sums: what a token forgets is lost beside much that tokens before it forgot.
        sums = self.decay.masked_fill(forgotten, 0.0).flip(2).cumsum(dim=2).flip(2)
        left = torch.nn.functional.pad(sums[:, :, 1:], (0, 0, 0, 1)).masked_fill(forgotten, -torch.inf).exp()
        written = (self.keys * left).transpose(2, 3)
        state *= sums[:, :, :1].exp().transpose(2, 3)
        return state.flatten(0, 1).baddbmm_(written.flatten(0, 1), self.values.flatten(0, 1)).view_as(state)


def delta_rule(its: Arguments, state: torch.Tensor) -> Written:
    """Of a gated delta rule whose heads decay as a whole, `g` (B, Q, H), or by channel, (B, Q, H, K) as Kimi's do."""
    keys, values, decay = (_by_heads(its[name]) for name in ("key", "value", "g"))
    if its["use_qk_l2norm_in_kernel"]:
        keys = keys * torch.rsqrt(keys.square().sum(dim=-1, keepdim=True) + 1e-6)
    if keys.shape[1] != values.shape[1]:
        keys = keys.repeat_interleave(values.shape[1] // keys.shape[1], dim=1)
    beta = its["beta"].transpose(1, 2).float()[..., None]
    by_channel = its["g"].dim() == 4
    decay = decay if by_channel else decay[..., None]
    every = torch.ones(decay.shape[2], decay.shape[2], dtype=torch.bool, device=state.device)
    between = decay[:, :, :, None].masked_fill(every.triu()[..., None], 0.0).cumsum(dim=2)  # (B, H, Q, Q, K or 1)
    between = between.masked_fill(
        every.triu(1)[..., None], -torch.inf
    ).exp()  # what is left at a token of an earlier one
    weighted = keys * beta
    if by_channel:
        system = (weighted[:, :, :, None] * keys[:, :, None] * between).sum(dim=-1)
    else:
        system = (weighted @ keys.transpose(2, 3)) * between[..., 0]
    missing = values * beta - (weighted * decay.cumsum(dim=2).exp()) @ state
    return Written(keys, torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True), decay)


def mamba2(its: Arguments, state: torch.Tensor) -> Written:
    """Of a Mamba-2 scan whose `dt` (B, Q, H) is Δ itself."""
    times = its["dt"].float()
    heads = its["hidden_states"].float().transpose(1, 2)
    written = its["B"].float().transpose(1, 2)
    written = written.repeat_interleave(heads.shape[1] // written.shape[1], dim=1)
    decay = (its["A"].float() * times).transpose(1, 2)[..., None]
    return Written(heads * times.transpose(1, 2)[..., None], written, decay)


class ClosedForm(NamedTuple):
    """Of one kind of recurrence."""

    writes: Callable[[Arguments, torch.Tensor], Written]
    by_token: tuple[str, ...]  # arguments (B, Q, …)
    of_layer: tuple[str, ...]  # arguments (H,)
    by_head: str  # of (B, Q, H, V), of which the state's H
    flags: tuple[str, ...]
    others: frozenset[str]  # arguments that say nothing of the state

    def may(self, arguments: Arguments) -> bool:
        """Whether all that these say is known here."""
        known = {*self.by_token, *self.of_layer, *self.flags, *self.others}
        more = [value for name, value in arguments.items() if name not in known]
        return all(name in arguments for name in (*self.by_token, *self.of_layer)) and not any(
            isinstance(value, torch.Tensor) or value for value in more
        )


def _by_heads(given: torch.Tensor) -> torch.Tensor:
    """(B, Q, H, …) as (B, H, Q, …) in float32."""
    return given.transpose(1, 2).float()


_DELTA = ClosedForm(
    delta_rule, ("key", "value", "g", "beta"), (), "value", ("use_qk_l2norm_in_kernel",),
    frozenset({"query", "chunk_size", "output_final_state", "initial_state"}),
)  # fmt: skip
CLOSED_FORMS = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": ClosedForm(
        mamba2, ("hidden_states", "dt", "B"), ("A",), "hidden_states", (),
        frozenset({"C", "D", "z", "chunk_size", "dt_bias", "dt_softplus", "dt_limit", "return_final_states", "initial_states"}),
    ),
}  # fmt: skip


class Block(NamedTuple):
    """A block of one layer, of a form whose `may` says yes."""

    form: ClosedForm
    arguments: Arguments  # ready
    state: torch.Tensor  # (B, H, K, V)

    @property
    def likes(self) -> tuple[Any, ...]:
        """What blocks that stand side by side have in common."""
        own = [self.arguments[name] for name in (*self.form.by_token, *self.form.of_layer)] + [self.state]
        flags = tuple(bool(self.arguments.get(name)) for name in self.form.flags)
        return (self.form.writes, flags, *((its.shape, its.dtype, its.device) for its in own))


def states_behind(blocks: Sequence[Block], ends: Ends) -> list[torch.Tensor]:
    """Of each block the state behind each row's first tokens, in float32."""
    out: list[Any] = [None] * len(blocks)
    groups: dict[Any, list[int]] = {}
    for number, block in enumerate(blocks):
        groups.setdefault(block.likes, []).append(number)
    for group in groups.values():
        at_once = max(1, NUMBERS // max(1, blocks[group[0]].state.numel()))
        for start in range(0, len(group), at_once):
            numbers = group[start : start + at_once]
            found = _side_by_side([blocks[number] for number in numbers], ends)
            for number, state in zip(numbers, found, strict=True):
                out[number] = state
    return out


def _side_by_side(blocks: Sequence[Block], ends: Ends) -> tuple[torch.Tensor, ...]:
    """`blocks` are alike."""
    first = blocks[0]
    many: Arguments = {}
    for name in first.form.by_token:
        many[name] = torch.cat([its.arguments[name] for its in blocks])
    for name in first.form.of_layer:  # (layers · B, 1, H)
        each = torch.stack([its.arguments[name] for its in blocks])
        many[name] = each.repeat_interleave(len(first.state), dim=0)[:, None]
    for name in first.form.flags:
        many[name] = bool(first.arguments.get(name))
    state = torch.cat([its.state for its in blocks]).float()
    written = first.form.writes(many, state)
    return written.behind(state, ends.on(state.device).repeat(len(blocks))).chunk(len(blocks))
