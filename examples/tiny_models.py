"""A tiny random model of any model type that the installed Transformers has: its default config, shrunk by rules.

`tiny_config(model_type)` reads the fields of the config's class and gives each number that has a say in the model's size a small
one; of layers, one of each kind stays. Windows and chunks shrink to `WINDOW`, so that a text of 30 tokens crosses them.
`lively(model)` gives it weights that make texts vary: a freshly initialised model repeats one token for ever.
"""

import copy
import dataclasses
import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto import modeling_auto


VOCABULARY, PAD = 97, 0
WINDOW = 8
NEVER_EMITTED = VOCABULARY + 5  # as end token: every text runs to its full length

# What a field is called → its tiny value; the first pattern that fits counts. Everything else keeps its default.
SIZES = {
    r"type_vocab_size|segment_types|prompt_types": 2,
    r"num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups|multi_query_group_num": 2,
    r"(num_|n_|_)?mamba_(n_|num_)?heads|n_mamba_heads": None,
    r".*vocab_size(_per_layer_input)?|.*_vocab": VOCABULARY,
    r"vocab_size_base": VOCABULARY,
    r"sliding_window(_size)?|attention_window_size|window_size|local_attention(_window_len)?": WINDOW,
    r"attention_chunk_size|keep_window_size|attention_window|conf_attention_chunk_size": WINDOW,
    r"max_window_layers": 0,
    r"hidden_size|d_model|n_embd|dim|embedding_size|word_embed_proj_dim|embed_dim|lru_width": 32,
    r"attention_hidden_size|hidden_size_global|backbone_hidden_size|output_proj_dims|mm_embed_dim": 32,
    r".*(ffn|ff|mlp|intermediate|feed_forward|inner).*(dim|size)": 64,
    r"d_ff|dff|dim_ff|ffn_hidden_size|n_inner|.*intermediate_size": 64,
    r"head_dim|global_head_dim|d_kv|dim_head|kv_channels|d_head|attention_head_size|swa_head_dim": 8,
    r"v_head_dim|qk_rope_head_dim|qk_nope_head_dim|index_head_dim|linear_.*head_dim|indexer_head_dim": 8,
    r"rotary_dim": 8,
    r"qk_head_dim": 16,
    r".*lora_rank|.*lowrank|gated_norm_rank|laurel_rank|d_rel": 8,
    r"index_topk|indexer_budget": 4,
    r"(num_|n_|encoder_|decoder_|speech_encoder_|t2u_|num_encoder_|num_decoder_|conf_num_)*(attention_)?heads?": 4,
    r"(n_|num_|encoder_|decoder_|t2u_.*|speech_encoder_|num_encoder_|num_decoder_)(hidden_)?layers?|depth": 2,
    r"(num|n|moe_num)_(local_|routed_)?experts": 4,
    r"num_experts_per_tok|moe_topk|moe_top_k|moe_k|top_k_experts": 2,
    r"n_group|topk_group|num_expert_group": 1,
    r".*(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|max_sequence_length)": 256,
    r"image_size|crop_size": 16,
    r"patch_size": 8,
}

# Fields that the rules get wrong, by model type; nested ones as dictionaries. A callable is given the shrunk fields.
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}  # heads × size = twice the hidden size
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA | {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dots1": {"num_local_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"num_blocks": 2, "embedding_dim": 32},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [16, 16]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "fsmt": {"scale_embedding": False},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "hrm_text": {"num_layers_per_stack": None},
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
}


def model_types() -> dict[str, list[str]]:
    """Every model type with a causal or an encoder-decoder language model → which of the two ("causal", "encoder-decoder")."""
    kinds = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    names = sorted(set().union(*kinds.values()))
    return {name: [kind for kind, types in kinds.items() if name in types] for name in names}


def small(name: str, value: Any) -> Any:
    """The tiny value of the config field `name` whose default is `value`."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    for pattern, tiny in SIZES.items():
        if re.fullmatch(pattern, name):
            return value if tiny is None else min(value, tiny)
    return value


def default_config(cls: Any) -> Any:
    """The config as the class makes it, with fields read although they may vary between layers."""
    config = cls()
    config.allow_global_per_layer_attribute_access = True
    return config


def shrunk(cls: Any) -> dict[str, Any]:
    """Arguments for a tiny config of `cls`."""
    default = default_config(cls)
    fields: dict[str, Any] = {field.name: getattr(default, field.name, None) for field in dataclasses.fields(cls)}
    for old in ("id2label", "label2id", "dtype", "architectures", "transformers_version", "torch_dtype"):
        fields.pop(old, None)
    subs = {name: sub for name, sub in getattr(cls, "sub_configs", {}).items() if name in fields}
    depth: int = next(
        (fields[n] for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if fields.get(n)), 0
    )
    lists = {k: v for k, v in fields.items() if isinstance(v, list | tuple) and len(v) == depth > 1}
    chosen = one_of_each(lists, depth)
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if name in subs:
            kind = type(value) if value is not None and hasattr(type(value), "__dataclass_fields__") else subs[name]
            if hasattr(kind, "__dataclass_fields__"):
                out[name] = shrunk(kind)
        elif name in lists:
            out[name] = [value[i] for i in chosen]
            if out[name] and isinstance(out[name][0], int):
                out[name] = [small(name, item) for item in out[name]]
        elif name.endswith(("_token_id", "_token_index", "token_id")) and name not in SPECIAL:
            out[name] = value if not isinstance(value, int) else NEVER_EMITTED + 1
        elif value is not None:
            out[name] = small(name, value)
    heads = [fields.get(name) for name in ("num_attention_heads", "num_key_value_heads")]
    if "kv_lora_rank" in fields and heads[0] == heads[1]:  # latent attention has no groups of heads
        out["num_key_value_heads"] = out["num_attention_heads"]
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if name in out and lists:
            out[name] = len(chosen)
    for name, token in SPECIAL.items():
        if name in fields and fields[name] is not None or name in ("pad_token_id", "bos_token_id"):
            out[name] = token
    if "rope_parameters" in out:
        out["rope_parameters"] = small_rope(out["rope_parameters"])
    return out


SPECIAL = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 3, "decoder_start_token_id": 2, "forced_eos_token_id": None,
           "forced_bos_token_id": None, "sep_token_id": 3, "cls_token_id": 1}  # fmt: skip


def one_of_each(lists: dict[str, Any], depth: int) -> list[int]:
    """Layers to keep: the first of each combination of kinds, at least two and at most five."""
    seen: dict[str, int] = {}
    for i in range(depth):
        seen.setdefault(str([value[i] for name, value in lists.items() if isinstance(value[i], str)]), i)
    chosen = sorted(seen.values())[:5]
    return chosen if len(chosen) > 1 else list(range(min(depth, 2)))


def small_rope(rope: Any) -> Any:
    """RoPE's parameters with lengths small enough to be crossed, where the type of RoPE has lengths."""
    if not isinstance(rope, dict):
        return rope
    if rope and all(isinstance(value, dict) for value in rope.values()):  # one for each kind of layer
        return {kind: small_rope(value) for kind, value in rope.items()}
    rope = dict(rope)
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = 16
    return rope


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The default config of `model_type`, shrunk."""
    cls = CONFIG_MAPPING[model_type]
    fields = shrunk(cls)
    merge(fields, OVERRIDES.get(model_type, {}))
    merge(fields, {name: value for name, value in changes.items() if name in fields})
    return cls(**fields)


def merge(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(fields.get(name), dict) and "rope" not in name:
            merge(fields[name], value)
        else:
            fields[name] = copy.deepcopy(value)


def tiny_model(model_type: str, kind: str, attention: str, seed: int = 0, **changes: Any) -> Any:
    """A lively tiny model. `kind`: "causal" or "encoder-decoder"; `attention`: "sdpa" or "eager"."""
    config = tiny_config(model_type, **changes)
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    untie(config)
    auto = AutoModelForCausalLM if kind == "causal" else AutoModelForSeq2SeqLM
    torch.manual_seed(seed)
    model = auto.from_config(config, attn_implementation=attention).float().eval()
    return lively(model, seed)


def untie(config: Any) -> None:
    """Output weights of their own: with the input's, a random model mostly repeats the token that it read last."""
    for part in [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]:
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False


GAINS = (1.5, 2.5, 1.2, 4.0)  # of matrices, by seed: what makes one model chaotic leaves another on one token


@torch.no_grad()
def lively(model: Any, seed: int = 0) -> Any:
    """Other weights in place: matrices spread so that signals neither die nor explode, embeddings wide, no bias at zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if not weight.is_floating_point():
            continue
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() > 1:
            fan = weight.shape[-1] if weight.dim() == 2 else max(weight.shape[-2:])
            weight.copy_(noise * GAINS[seed % len(GAINS)] / fan**0.5)
            if re.search(r"(?i)encoder_attn|encdec|cross", name):  # the encoder says the same at every position
                weight.mul_(0.5)
        else:
            weight.add_(0.3 * noise)  # Doge's, for one, are all alike before training
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            spread = (1.0, 0.3)[seed % 2]  # less, where a token would decide alone what follows it
            module.weight.copy_(spread * torch.randn(module.weight.shape, generator=generator))
    return varied(model, generator)


def output_layer(model: Any) -> Any:
    """The linear layer that makes the logits, or None: of FSMT, whose table of embeddings counts as one, the layer itself."""
    layers = [
        model.get_output_embeddings(),
        *(m for name, m in model.named_modules() if name.endswith("output_projection")),
    ]
    return next((layer for layer in layers if isinstance(layer, torch.nn.Linear)), None)


def varied(model: Any, generator: torch.Generator) -> Any:
    """Take out of the output weights what all positions have in common: else one token wins everywhere."""
    head, seen = output_layer(model), []
    if head is None:
        return model
    hook = head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ids = torch.randint(4, VOCABULARY - 8, (4, 24), generator=generator)
    try:
        model(ids, **({"decoder_input_ids": ids.flip(0)} if model.config.is_encoder_decoder else {}))
    finally:
        hook.remove()
    states = seen[-1].reshape(-1, seen[-1].shape[-1]).float()
    common = torch.nn.functional.normalize(states.mean(dim=0), dim=0)
    weight = head.weight - (head.weight @ common)[:, None] * common
    head.weight = torch.nn.Parameter(weight * 3 / (states @ weight.T).std())
    return model
