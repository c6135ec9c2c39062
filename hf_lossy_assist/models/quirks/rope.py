"""Rotary embeddings whose frequencies depend on the length of the text ("dynamic", "longrope"): tokens get the same frequencies as in `generate`.

Transformers computes one set of frequencies per forward, from its largest position. In `generate` without a draft, at batch 1, that is the prompt's
last position in the first forward and then the position of each token, and cached keys keep the frequencies they were written with. A
block of several tokens or rows needs several sets: each token's follow from `max(its prompt's length, its position + 1)`.

Some models (Phi-3) recompute their cache with the long frequencies when the text exceeds the original length; so does this package, and no draft
crosses that position.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from ..compat import CACHE
from ..patching import Forward, Patch, running


Rotation = torch.Tensor | tuple[torch.Tensor, ...]  # complex numbers, or cosines and sines


def _changes(kind: object) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def changing_kind(module: torch.nn.Module) -> str | None:
    """Return the module's kind of RoPE if it changes with the length of the text, or None; a module may have several kinds."""
    kinds = getattr(module, "rope_type", None)
    return next((kind for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]) if _changes(kind)), None)


def configured_kind(config: PreTrainedConfig) -> str | None:
    """Return the kind of RoPE in `config` (one of several, if layers differ) that changes with the length of the text, or None."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        parts = [found, *found.values()] if isinstance(found, dict) else []
        for part in parts:
            kind = part.get("rope_type", part.get("type")) if isinstance(part, dict) else None
            if _changes(kind) or kind == "su":  # its name in Phi-3's remote code
                return str(kind)
    return None


class ChangingRope:
    """The rotary modules of one model, for the rows of one call."""

    def __init__(self, base: PreTrainedModel, modules: Sequence[torch.nn.Module], rows: int):
        self.modules = list(modules)
        self.first = [0] * rows  # each text's length in its first forward, or when its cache was recomputed
        self.renewed_after = _renewed_after(base)  # tokens; None: the cache is never recomputed
        self.patches = [Patch(module, "forward", partial(_rotate, _clean(module))) for module in self.modules]

    @classmethod
    def of(cls, base: PreTrainedModel, rows: int) -> "ChangingRope | None":
        """Return None for a model without RoPE that changes with the length of the text, as nearly all models."""
        # Not cached: the RoPE of a model may be changed.
        changing = [module for module in base.modules() if changing_kind(module) is not None]
        return cls(base, changing, rows) if changing else None

    @property
    def changes_after(self) -> int:
        """Return the length of text up to which all frequencies are the original ones."""
        found = []
        for module in self.modules:
            kinds: Any = module.rope_type
            found += [_original(module, name) for name in (kinds if isinstance(kinds, dict) else [None])]
        return min(original for kind, original in found if _changes(kind))

    def begin(self, lengths: Sequence[int]) -> None:
        """Set the length of each row's prompt, before its first forward."""
        self.first = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        self.first = [self.first[row] for row in rows]

    def room(self, held: Sequence[int], budgets: Sequence[int]) -> list[int]:
        """Return how many tokens, up to `budgets`, each row may draft after its `held` tokens and the next before its cache must be recomputed."""
        edge = self.renewed_after
        if edge is None:
            return list(budgets)
        return [min(room, edge - 1 - n) if n < edge else room for n, room in zip(held, budgets, strict=True)]

    def due(self, held: Sequence[int]) -> list[int]:
        """Return the rows whose cache must be recomputed before the token after their `held` tokens is fed."""
        edge = self.renewed_after
        return [] if edge is None else [b for b, n in enumerate(held) if n >= edge >= self.first[b]]

    def lengths_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the length of text that determines the frequencies of each token at `positions` (1 or B, Q), (1 or B, Q), on the CPU."""
        lengths = torch.maximum(positions + 1, torch.tensor(self.first)[:, None])
        return lengths[:1] if bool((lengths == lengths[:1]).all()) else lengths

    def at(self, positions: torch.Tensor) -> AbstractContextManager[None]:
        """Run a forward in this thread with tokens at `positions` (1 or B, Q), on the CPU."""
        return running(Forward(rope_lengths=self.lengths_at(positions)), self.patches)


def renewing(*models: Any) -> list[tuple[Any, ChangingRope]]:
    """Return the models of a call that recompute their cache when a text exceeds a certain length."""
    ropes = [(model, model.rope) for model in models if model is not None and model.rope is not None]
    return [(model, rope) for model, rope in ropes if rope.renewed_after is not None]


def renew(models: Sequence[tuple[Any, ChangingRope]], rows: Any, clock: Any) -> None:
    """Recompute the caches of rows whose next token lies beyond the length for which they are valid."""
    for model, rope in models:
        # Transformers' cache is renewed in `CroppingModel.feed`.
        for b in rope.due(rows.cached_lengths()) if hasattr(model, "renew") else []:
            if not rows.finished[b]:
                with clock.time("prefill"):
                    model.renew(b, rows.token_ids()[b][: model.lengths[b]])


def _original(module: torch.nn.Module, layer_type: str | None) -> tuple[str, int]:
    """Return the kind of RoPE, and the length of text up to which its frequencies are the original ones."""
    kinds: Any = module.rope_type
    kind = kinds if layer_type is None else kinds[layer_type]
    if kind != "longrope":
        return kind, int(module.original_max_seq_len)  # type: ignore[arg-type]
    config: PreTrainedConfig = module.config
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    return kind, int(parameters["original_max_position_embeddings"])


def _at_length(
    clean: torch.nn.Module, x: torch.Tensor, positions: torch.Tensor, length: int, **kwargs: object
) -> list[torch.Tensor]:
    """Return cosines and sines, or one tensor of complex numbers, for a text of `length` tokens."""
    # An extra position conveys the length.
    end = positions.new_full((*positions.shape[:-1], 1), length - 1)
    # A module remembers the longest text so far, so each length starts from a new copy.
    found = type(clean).forward(_clean(clean), x, torch.cat([positions, end], dim=-1), **kwargs)
    return [part[..., :-1, :] for part in ([found] if isinstance(found, torch.Tensor) else found)]


def _clean(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a rotary module in its initial state. Rotary modules have no weights."""
    out: Any = copy.copy(module)
    out._buffers = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    for name in [*out._buffers, *vars(out)]:
        if name.endswith("original_inv_freq"):
            current = name.replace("original_inv_freq", "inv_freq")
            out._buffers[current] = getattr(module, name).to(out._buffers[current].device, copy=True)
        elif name.endswith("max_seq_len_cached"):
            setattr(out, name, out.original_max_seq_len)
    return out


def _renewed_after(base: PreTrainedModel) -> int | None:
    """Return the cache length beyond which `generate` drops the cache and runs the text again, as with Phi-3, or None."""
    edge = getattr(base.config, "original_max_position_embeddings", None)
    if not isinstance(edge, int):
        return None
    cache, device = DynamicCache(), base.get_input_embeddings().weight.device
    cache.update(torch.zeros(1, 1, edge, 1), torch.zeros(1, 1, edge, 1), 0)
    ids = torch.zeros(1, edge + 1, dtype=torch.int64, device=device)
    inputs = base.prepare_inputs_for_generation(ids, **{CACHE: cache}, next_sequence_length=1, use_cache=True)
    return edge if inputs.get(CACHE) is None else None


def _rotate(
    clean: torch.nn.Module,
    forward: Forward,
    original: Callable[..., Rotation],
    x: torch.Tensor,
    position_ids: torch.Tensor,
    layer_type: str | None = None,
) -> Rotation:
    """Rotate at `position_ids` (…, 1 or B, Q), each token with the frequencies for its length of text. `clean`: the module in its initial state."""
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    kind, edge = _original(clean, layer_type)
    lengths = forward.rope_lengths  # (1 or B, Q)
    # Other layer types may have another kind, and a vision tower's positions are not the text's.
    if lengths is None or not _changes(kind) or lengths.shape[1] != position_ids.shape[-1]:
        return original(x, position_ids, **kwargs)
    positions = position_ids.to(x.device)
    whole: list[torch.Tensor] = []
    # Merge lengths with the same frequencies.
    lengths = lengths.clamp(min=edge, max=None if "dynamic" in kind else edge + 1)
    for length in (found := lengths.unique().tolist()):
        # The longest text's frequencies apply to all later positions; results for other tokens are discarded.
        reached = positions if length == found[-1] else positions.clamp(max=length - 1)
        parts = _at_length(clean, x, reached, length, **kwargs)
        inside = (lengths == length).to(x.device)[..., None]
        whole = [torch.where(inside, *pair) for pair in zip(parts, whole, strict=True)] if whole else parts
    return whole[0] if len(whole) == 1 else tuple(whole)
