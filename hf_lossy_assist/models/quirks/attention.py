"""Quirks of attention by the mask or the length of the cache: ALiBi, temperatures, copies for grouped queries."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from transformers import PreTrainedModel
from transformers.integrations import sdpa_attention

from ..introspection import ORDINARY, attention_of, modelling_files
from ..patching import Forward, Patch


TensorMaker = Callable[..., torch.Tensor]  # a function of Transformers that is replaced


def alibi_by_position(base: PreTrainedModel) -> Iterable[Patch]:
    """Find the makers of ALiBi's biases (BLOOM, Falcon, MPT).

    Token i of each row is at slot i, so all rows have the biases of a text without padding; only what may be seen differs. BLOOM's and
    Falcon's function takes the mask of a text, (B, n), and rows have one for each token, (B, 1, Q, n). MPT's makes biases for its longest
    text, and a block's padding may reach beyond it.
    """
    for file in modelling_files(base):
        for name, by in {"build_alibi_tensor": _by_position, "build_mpt_alibi_tensor": _long_enough}.items():
            if hasattr(file, name):
                yield Patch(file, name, by)


def _by_position(
    forward: Forward, original: TensorMaker, mask: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    if mask.dim() == 4:
        mask = torch.ones(mask.shape[0], mask.shape[-1], dtype=torch.int64, device=mask.device)
    return original(mask, *args, **kwargs)


def _long_enough(
    forward: Forward, original: TensorMaker, heads: int, longest: int, *args: object, **kwargs: object
) -> torch.Tensor:
    # The model takes the last ones of more biases.
    return original(heads, max(longest, forward.cache.visible), *args, **kwargs)


def attention_temperature(base: PreTrainedModel) -> Iterable[Patch]:
    """Find the queries that are multiplied by a temperature of the cache's length (Llama 4's layers without RoPE).

    The factor is 1 + a·log(1 + ⌊(n + 1) / s⌋) for the token at position n, counted from the cache's one length, the shortest row's.
    Only where the tokens of a forward fall into several steps of s does that matter; then queries are multiplied by what is missing.
    """
    for layer in base.modules():
        if getattr(layer, "attn_temperature_tuning", False) and not layer.use_rope:
            yield Patch(layer.q_proj, "forward", partial(_with_temperature, layer))


def _with_temperature(layer: Any, forward: Forward, original: TensorMaker, hidden: torch.Tensor) -> torch.Tensor:
    query = original(hidden)
    rows, positions = forward.cache, forward.positions
    one_step = (rows.start + 1) // layer.floor_scale == rows.visible // layer.floor_scale
    if rows.slots is None or one_step or positions is None:
        return query
    counted = rows.start + torch.arange(positions.shape[1], device=positions.device)[None]
    right, wrong = (_temperature(layer, at.to(query.device)) for at in (positions, counted))
    return (query * (right / wrong)[..., None]).to(query.dtype)


def _temperature(layer: Any, positions: torch.Tensor) -> torch.Tensor:
    return torch.log1p(torch.floor((positions.float() + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0


def grouped_queries_on_cpu(base: PreTrainedModel) -> Iterable[Patch]:
    """Find the choice to copy keys and values for each head of queries (grouped-query attention).

    With a mask, as each block on rows has, Transformers copies them: on a GPU that finds faster kernels. On a CPU PyTorch's kernel reads
    the few heads as they are, and for blocks of few tokens the copies take several times as long as the attention (docs/log.md).
    """
    groups = any(getattr(part, "num_key_value_groups", 1) > 1 for part in base.modules())
    # A Transformers that decides in another way is left alone.
    known = hasattr(sdpa_attention, "use_gqa_in_sdpa")
    if known and groups and attention_of(base.config.get_text_config(decoder=True)) == ORDINARY:
        yield Patch(sdpa_attention, "use_gqa_in_sdpa", _reads_groups)


def _reads_groups(
    forward: Forward,
    original: Callable[..., bool],
    mask: object,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> bool:
    chosen = original(mask, key, value, *args, **kwargs)
    if chosen or torch.compiler.is_compiling() or key.device.type != "cpu":
        return chosen
    return mask is not None and key.shape[-1] == value.shape[-1] and has_kernel_for_groups(key.dtype)


@cache
def has_kernel_for_groups(dtype: torch.dtype) -> bool:
    """Tell whether this PyTorch has a CPU kernel for grouped queries; its plain way, which it takes else, is no faster than copies."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return False
    query, few = torch.zeros(1, 4, 3, 8, dtype=dtype), torch.zeros(1, 2, 5, 8, dtype=dtype)
    try:
        chosen = choose(query, few, few, torch.zeros(1, 1, 3, 5, dtype=dtype), enable_gqa=True)
    except (TypeError, RuntimeError):  # of older releases
        return False
    return bool(chosen == SDPBackend.FLASH_ATTENTION.value)
