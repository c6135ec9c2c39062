"""Decoders whose forward takes no positions but counts from the cache length: each row's tokens get positions from their row.

Two parts of such a decoder use positions: a table (BART, Marian, M2M100, Speech2Text) and a bias by distance (T5 and similar). The table of a
decoder-only model is indexed by columns, as in `generate`, padding and holes included.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from ..compat import CACHE, CACHE_NAMES, takes_positions
from ..introspection import base_of, learned_positions, modelling_files, remember
from ..patching import Forward, Patch
from .attention import TensorMaker


BEFORE = f"{CACHE}_length"  # argument of a table's forward: the number of tokens before the requested ones
ROTATE = "apply_rotary_position_embeddings"  # RoFormer's
LENGTHS = {f"{name}_length" for name in CACHE_NAMES}


@dataclass(frozen=True)
class PositionSources:
    """The parts of a decoder that use the positions of its tokens."""

    argument: str | None  # name of the forward's argument for positions; if there is one, nothing else is needed
    tables: tuple[torch.nn.Module, ...] = ()
    biases: tuple[torch.nn.Module, ...] = ()  # attention modules with a `compute_bias` by distance

    @classmethod
    def of(cls, model: PreTrainedModel) -> "PositionSources":
        """Find the sources in a model, wrapped or not, once for each model object."""
        base = base_of(model)
        return remember(base, "position sources", lambda: _find(base))

    @property
    def known(self) -> bool:
        """Return whether any source was found."""
        return self.argument is not None or bool(self.tables or self.biases)

    @property
    def reads_tokens(self) -> bool:
        """Return whether a token's position depends on the tokens: sinusoids that skip padding, and count the tokens of a block without it."""
        return any(_padding_of(table) is not None for table in self.tables)


def _find(base: PreTrainedModel) -> PositionSources:
    argument = _argument(base)
    if argument is not None:
        return PositionSources(argument)
    if not base.config.is_encoder_decoder:
        return PositionSources(None, tuple(part for part in base.modules() if _takes_positions(part)))
    parts = dict(base.get_decoder().named_modules())
    tables = [part for name, part in parts.items() if name.rpartition(".")[2] == "embed_positions"]
    biases = [part for part in parts.values() if getattr(part, "has_relative_attention_bias", False)]
    return PositionSources(
        None,
        tuple(table for table in tables if BEFORE in _parameters(table.forward)),
        tuple(part for part in biases if "past_seen_tokens" in _parameters(getattr(part, "compute_bias", _find))),
    )


def _argument(base: PreTrainedModel) -> str | None:
    names = _parameters(base.forward)
    if not base.config.is_encoder_decoder:
        return "position_ids" if takes_positions(base) else None
    # `EncoderDecoderModel` passes arguments that begin with "decoder_" on to its decoder.
    composite = base.config.model_type == "encoder-decoder" and hasattr(base, "decoder")
    inner = composite and "position_ids" in _parameters(base.decoder.forward)
    return "decoder_position_ids" if inner or "decoder_position_ids" in names else None


def _parameters(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters)


def _takes_positions(table: object) -> bool:
    names = _parameters(table.forward) if isinstance(table, torch.nn.Embedding) else set()
    return bool(names & LENGTHS) and "position_ids" in names


def _padding_of(table: object) -> int | None:
    """Return the token that gets no position from a table, or None for tables that do not read tokens, such as an `Embedding`."""
    return None if isinstance(table, torch.nn.Embedding) else getattr(table, "padding_idx", None)


def positions_by_cache_length(base: PreTrainedModel) -> Iterable[Patch]:
    """Yield patches for the tables and biases of a decoder that takes no positions."""
    sources = PositionSources.of(base)
    for table in sources.tables:
        by = _ask_by_position if _takes_positions(table) else partial(_look_up, table, learned_positions(base))
        yield Patch(table, "forward", by)
    for attention in sources.biases:
        yield Patch(attention, "compute_bias", _bias_by_position)


def relative_positions(base: PreTrainedModel) -> Iterable[Patch]:
    """Yield patches for distances between tokens, and rotations, that are computed for one row: RoFormer, Inkling."""
    for file in modelling_files(base):
        if hasattr(file, "get_relative_distance"):
            yield Patch(file, "get_relative_distance", _distances)
    for part in base.modules():
        if hasattr(part, ROTATE):
            yield Patch(part, ROTATE, _rotate_rows)
        if hasattr(part, "rel_logits_proj"):
            yield Patch(part.rel_logits_proj, "forward", partial(_bias_by_row, part))
            yield Patch(part.q_norm, "forward", partial(_scale_by_row, part))


def _distances(forward: Forward, original: TensorMaker, *args: object, **kwargs: object) -> torch.Tensor:
    """Return the distances from each query to each slot, (B, 1, Q, visible) if rows differ."""
    if forward.positions is None or forward.cache.slots is None:
        return original(*args, **kwargs)
    slots = torch.arange(forward.cache.visible, device=forward.positions.device)
    return forward.positions[:, None, :, None] - slots


def _rotate_rows(forward: Forward, original: Callable[..., object], angles: torch.Tensor, *states: object) -> object:
    """Rotate states (B, heads, Q, d) by `angles`, (1, 1, 1 or B, Q, d) from a table asked by position."""
    return original(angles[0, 0][:, None] if angles.dim() == 5 else angles, *states)


def _bias_by_row(
    layer: torch.nn.Module,
    forward: Forward,
    original: TensorMaker,
    states: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    if forward.positions is None or forward.cache.slots is None:
        return original(states, queries, keys)
    rows = zip(states.split(1), forward.positions, strict=True)
    bias = torch.cat([original(row, positions, keys) for row, positions in rows])
    return bias * _log_scale(layer, forward, bias)[:, None, :, None]


def _scale_by_row(
    layer: torch.nn.Module, forward: Forward, original: TensorMaker, query: torch.Tensor
) -> torch.Tensor:
    query = original(query)  # (B, Q, heads, d)
    if forward.positions is None or forward.cache.slots is None:
        return query
    return query * _log_scale(layer, forward, query)[..., None, None]


def _log_scale(layer: torch.nn.Module, forward: Forward, like: torch.Tensor) -> torch.Tensor:
    """Return the factors (B, Q) that correct a scale, by the logarithm of the position, for the rows that are longer than the shortest."""
    assert forward.positions is not None
    floor, slope = getattr(layer.config, "log_scaling_n_floor", None), getattr(layer.config, "log_scaling_alpha", 0.0)
    if layer.is_sliding or floor is None:
        return like.new_ones(1, 1)
    counted = forward.cache.start + torch.arange(forward.positions.shape[1], device=like.device)[None]
    right, wrong = (
        1.0 + slope * torch.log(((at + 1).float() / floor).clamp(min=1.0))
        for at in (forward.positions.to(like.device), counted)
    )
    return (right / wrong).to(like.dtype)


def _ask_by_position(
    forward: Forward, original: TensorMaker, shape: torch.Size, *args: object, **kwargs: object
) -> torch.Tensor:
    assert forward.positions is not None
    found = original(shape, 0, position_ids=forward.positions.flatten())  # some tables add a batch dimension
    return found.view(*forward.positions.shape, found.shape[-1])


def _look_up(
    table: torch.nn.Module, end: int | None, forward: Forward, original: TensorMaker, *args: object, **kwargs: object
) -> torch.Tensor:
    """Return the entries (1 or B, Q, D) of a table that counts positions itself. `end`: the number of positions; None: unlimited."""
    assert forward.positions is not None
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    visible = forward.cache.visible if end is None else min(forward.cache.visible, end)
    padding = _padding_of(table)
    found = _entries(original, given, visible, int(padding == 0))[forward.positions]
    if padding is not None:
        ids = next(value for value in given.values() if isinstance(value, torch.Tensor) and value.dim() == 2)
        found = torch.where((ids == padding)[..., None], _entries(original, given, 1, padding)[0], found)
    return found


def _entries(original: TensorMaker, given: dict[str, object], length: int, token: int) -> torch.Tensor:
    """Return a table's first `length` entries, (length, D), as for a text that repeats `token`."""
    inputs: dict[str, object] = {}
    for name, value in given.items():
        if name == BEFORE:
            inputs[name] = 0
        elif isinstance(value, torch.Tensor) and name != "position_ids":
            inputs[name] = value.new_full((1, length, *value.shape[2:]), token)
        elif isinstance(value, tuple):  # a shape
            inputs[name] = torch.Size((1, length))
    return original(**inputs).reshape(length, -1)


def _bias_by_position(
    forward: Forward,
    original: TensorMaker,
    query_length: int,
    key_length: int,
    device: torch.device | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Return the biases of a `compute_bias` at the forward's positions, (1 or B, heads, Q, key_length)."""
    assert forward.positions is not None
    last = original(1, key_length, device=device, past_seen_tokens=key_length - 1)
    by_distance = last[0, :, 0].flip(-1)  # (heads, key_length)
    slots = torch.arange(key_length, device=forward.positions.device)
    distance = (forward.positions[..., None] - slots).clamp(min=0)  # later slots are masked
    return by_distance[:, distance].transpose(0, 1)
