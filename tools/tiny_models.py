"""Build a tiny random model of any model type of the installed Transformers: its default config, shrunk by rules.

`tiny_config(model_type)` reads the fields of the config's class and makes each number that determines the model's size
small; one layer of each kind remains. Windows and chunks shrink to `WINDOW`, so that a sequence of 30 tokens crosses them.
`lively(model)` sets weights that make outputs vary: a freshly initialised model repeats one token for ever.
"""

import copy
import dataclasses
import re
from typing import Any

import torch
from tiny_sizes import NEVER_EMITTED, OVERRIDES, SIZES, SPECIAL, VARIANTS, VOCABULARY
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
from transformers.models.auto import modeling_auto


def model_types() -> dict[str, list[str]]:
    """Return every model type with a causal or an encoder-decoder language model, and which of the two ("causal", "encoder-decoder")."""
    kinds = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    names = sorted(set().union(*kinds.values()))
    found = {name: [kind for kind, types in kinds.items() if name in types] for name in names}
    return found | {name: ["causal"] for name in VARIANTS}


def small(name: str, value: Any) -> Any:
    """Return the tiny value of the config field `name` whose default is `value`."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    for pattern, tiny in SIZES.items():
        if re.fullmatch(pattern, name):
            return value if tiny is None else min(value, tiny)
    return value


def default_config(cls: Any) -> Any:
    """Return the default config of the class, with fields readable that may vary between layers."""
    config = cls()
    config.allow_global_per_layer_attribute_access = True
    return config


def shrunk(cls: Any) -> dict[str, Any]:
    """Return arguments for a tiny config of `cls`."""
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
            items = [value[i] for i in chosen]  # kinds of layers stay
            out[name] = [small(name, item) for item in items] if isinstance(items[0], int) else items
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
    needed = ("pad_token_id", "bos_token_id")  # even if the default has none
    out |= {name: token for name, token in SPECIAL.items() if fields.get(name) is not None or name in needed}
    if "rope_parameters" in out:
        out["rope_parameters"] = small_rope(out["rope_parameters"])
    return out


def one_of_each(lists: dict[str, Any], depth: int) -> list[int]:
    """Return the layers to keep: the first of each combination of kinds, at least two and at most five."""
    seen: dict[str, int] = {}
    for i in range(depth):
        seen.setdefault(str([value[i] for name, value in lists.items() if isinstance(value[i], str)]), i)
    chosen = sorted(seen.values())[:5]
    return chosen if len(chosen) > 1 else list(range(min(depth, 2)))


def small_rope(rope: Any) -> Any:
    """Return RoPE's parameters with lengths small enough to be crossed, if the type of RoPE has lengths."""
    if not isinstance(rope, dict):
        return rope
    if rope and all(isinstance(value, dict) for value in rope.values()):  # one for each kind of layer
        return {kind: small_rope(value) for kind, value in rope.items()}
    rope = dict(rope)
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = 16
    return rope


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Return the shrunk default config of `model_type`, or of one of `VARIANTS`."""
    model_type, variant = VARIANTS.get(model_type, (model_type, {}))
    cls = CONFIG_MAPPING[model_type]
    fields = shrunk(cls)
    merge(fields, OVERRIDES.get(model_type, {}))
    merge(fields, variant)
    merge(fields, {name: value for name, value in changes.items() if name in fields})
    return cls(**fields)


def merge(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(fields.get(name), dict) and "rope" not in name:
            merge(fields[name], value)
        else:
            fields[name] = copy.deepcopy(value)


def tiny_model(model_type: str, kind: str, attention: str, seed: int = 0, **changes: Any) -> Any:
    """Return a lively tiny model. `kind`: "causal" or "encoder-decoder"; `attention`: "sdpa" or "eager"."""
    config = tiny_config(model_type, **changes)
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    untie(config)
    auto = AUTO[kind]
    torch.manual_seed(seed)
    model = auto.from_config(config, attn_implementation=attention).float().eval()
    return lively(model, seed)


AUTO = {
    "causal": AutoModelForCausalLM,
    "encoder-decoder": AutoModelForSeq2SeqLM,
    "image-text": AutoModelForImageTextToText,
}


def untie(config: Any) -> None:
    """Separate output weights from input weights: with tied ones a random model mostly repeats its last token."""
    for part in [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]:
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False


GAINS = (1.5, 2.5, 1.2, 4.0)  # of matrices, by seed: what makes one model chaotic leaves another on one token


@torch.no_grad()
def lively(model: Any, seed: int = 0) -> Any:
    """Replace the weights in place: matrices scaled so that signals neither vanish nor explode, wide embeddings, no zero bias."""
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
            spread = (1.0, 0.3)[seed % 2]  # smaller if a token alone would decide the next one
            module.weight.copy_(spread * torch.randn(module.weight.shape, generator=generator))
    return varied(model, generator)


def output_layer(model: Any) -> Any:
    """Return the linear layer that makes the logits, or None. FSMT's `get_output_embeddings` gives its embedding table instead."""
    projections = (module for name, module in model.named_modules() if name.endswith("output_projection"))
    layers = [model.get_output_embeddings(), *projections]
    return next((layer for layer in layers if isinstance(layer, torch.nn.Linear)), None)


def varied(model: Any, generator: torch.Generator) -> Any:
    """Remove from the output weights what all positions have in common; otherwise one token wins everywhere."""
    head, seen = output_layer(model), []
    if head is None:
        return model
    hook = head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ids = torch.randint(4, VOCABULARY - 8, (4, 24), generator=generator)
    try:
        model(input_ids=ids, **({"decoder_input_ids": ids.flip(0)} if model.config.is_encoder_decoder else {}))
    finally:
        hook.remove()
    states = seen[-1].reshape(-1, seen[-1].shape[-1]).float()
    common = torch.nn.functional.normalize(states.mean(dim=0), dim=0)
    weight = head.weight - (head.weight @ common)[:, None] * common
    head.weight = torch.nn.Parameter(weight * 3 / (states @ weight.T).std())
    return model
