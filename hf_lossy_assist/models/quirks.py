"""Model quirks: what some model families compute from the length of a whole batch is computed for each row.

A quirk is a function of a model that yields a `Patch` for each Transformers function that it replaces; `QUIRKS` lists
them.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from transformers import PreTrainedModel
from transformers.integrations import sdpa_attention
from transformers.utils import ModelOutput

from .facts import CACHE, forward_of
from .introspection import ORDINARY, StandIn, attention_of, base_of, cached_per_model, modelling_files, takes_masks
from .patching import Forward, Patch, running
from .recurrence import recorded_recurrences


TensorMaker = Callable[..., torch.Tensor]  # a Transformers function that a quirk replaces
FEW = 8  # tokens of a row; from 12 on the kernel is as fast with the heads apart


def alibi_by_position(base: PreTrainedModel) -> Iterable[Patch]:
    """Yield patches for the functions that compute ALiBi biases (BLOOM, Falcon, MPT).

    Token i of each row is at slot i, so all rows have the biases of an unpadded text; only visibility differs. The
    function of BLOOM and Falcon takes the mask of a text, (B, n), while rows have one per token, (B, 1, Q, n). MPT's
    computes biases up to its longest text, which the padding of a block may exceed.
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
    # The model uses the last biases of a longer list.
    return original(heads, max(longest, forward.cache.visible), *args, **kwargs)


def attention_temperature(base: PreTrainedModel) -> Iterable[Patch]:
    """Yield patches for queries that are scaled by a temperature depending on the cache length (Llama 4's layers
    without RoPE).

    The factor is 1 + a·log(1 + ⌊(n + 1) / s⌋) for the token at position n, counted from the cache's single length, the
    shortest row's. That differs only where the tokens of a forward fall into several steps of s; then the queries are
    multiplied by the ratio to the right factor.
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
    """Yield patches for grouped-query attention, where Transformers copies keys and values for each query head.

    Given a mask, as every block on rows is, the copies select faster kernels on a GPU. On a CPU, PyTorch's kernel reads
    grouped heads directly, and for blocks of few tokens the copies take several times as long as the attention
    (docs/log.md).
    """
    groups = any(getattr(module, "num_key_value_groups", 1) > 1 for module in base.modules())
    # Not for a Transformers release that decides differently.
    upstream = hasattr(sdpa_attention, "use_gqa_in_sdpa")
    if upstream and groups and attention_of(base.config.get_text_config(decoder=True)) == ORDINARY:
        yield Patch(sdpa_attention, "use_gqa_in_sdpa", _reads_groups)
        yield Patch(torch.nn.functional, "scaled_dot_product_attention", _attend)


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


def _attend(
    forward: Forward,
    original: TensorMaker,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    **kwargs: object,
) -> torch.Tensor:
    """Attend from few tokens with the heads of a group as further tokens of one head: the kernel then reads each key
    once for all of them."""
    rows, heads, tokens, size = query.shape
    masked = tokens == 1 if attn_mask is None else attn_mask.shape[1] == 1
    fits = enable_gqa and masked and not is_causal and tokens <= FEW and query.device.type == "cpu"
    if not fits or torch.compiler.is_compiling():
        return original(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa, **kwargs)
    groups = heads // key.shape[1]
    mask = attn_mask if attn_mask is None or attn_mask.shape[2] == 1 else attn_mask.repeat(1, 1, groups, 1)
    out = original(query.reshape(rows, -1, groups * tokens, size), key, value, mask, dropout_p, **kwargs)
    return out.reshape(rows, heads, tokens, -1)


@cache
def has_kernel_for_groups(dtype: torch.dtype) -> bool:
    """Return whether this PyTorch has a CPU kernel for grouped queries; its fallback is no faster than copies."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return False
    query, few = torch.zeros(1, 4, 3, 8, dtype=dtype), torch.zeros(1, 2, 5, 8, dtype=dtype)
    try:
        chosen = choose(query, few, few, torch.zeros(1, 1, 3, 5, dtype=dtype), enable_gqa=True)
    except (TypeError, RuntimeError):  # in older releases
        return False
    return bool(chosen == SDPBackend.FLASH_ATTENTION.value)


def attention_with_masks(base: PreTrainedModel) -> Iterable[Patch]:
    """Yield a patch for FlashAttention and FlexAttention, which take no mask of rows: sdpa computes the same.

    So does eager attention, for scores that are capped, and for models without sdpa.
    """
    config = base.config.get_text_config(decoder=True)
    attention = attention_of(config)
    if attention not in (ORDINARY, "eager") and takes_masks(attention):
        eager = getattr(config, "attn_logit_softcapping", None) is not None or not base._supports_sdpa
        name = StandIn("eager" if eager else ORDINARY)
        name.original = attention
        yield Patch(config, "_attn_implementation_internal", name)


QUIRKS: list[Callable[[PreTrainedModel], Iterable[Patch]]] = [
    alibi_by_position,
    attention_temperature,
    attention_with_masks,
    grouped_queries_on_cpu,
    recorded_recurrences,
]


@cached_per_model
def patches_of(base: PreTrainedModel) -> list[Patch]:
    """Return the patches of a model's quirks."""
    return [patch for quirk in QUIRKS for patch in quirk(base)]


def patched_forward(
    model: PreTrainedModel, run: Callable[..., ModelOutput] | None = None
) -> Callable[..., ModelOutput]:
    """Return a callable that takes `input_ids`, `position_ids`, a cache and row masks, whatever the quirks of `model`.

    `run`: an adapter that calls the model with other argument names.
    """
    base = base_of(model)
    call = forward_of(model, base) if run is None else run
    patches = patches_of(base)
    if not patches:
        return call

    def forward(**inputs: torch.Tensor) -> ModelOutput:
        with running(Forward(inputs[CACHE], inputs["position_ids"]), patches):
            return call(**inputs)

    return forward
