"""Files of drafters in each format, small ones, and ways to change them."""

import json

import torch
from safetensors.torch import load_file, save_file

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.io.formats import NEEDED
from support import eagle, small


CONFIG, WEIGHTS = "config.json", "model.safetensors"
LAYER = (*NEEDED, "num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings")


def changed(folder, **entries):
    """config.json with other entries; None takes one away."""
    file = folder / CONFIG
    spec = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({name: value for name, value in spec.items() if value is not None}))
    return folder


def relayered(folder, **entries):
    """With other settings of its layers, which the format of `speculators` nests."""
    layer = json.loads((folder / CONFIG).read_text()).get("transformer_layer_config")
    if layer is None:
        return changed(folder, **entries)
    settings = {name: value for name, value in (layer | entries).items() if value is not None}
    return changed(folder, transformer_layer_config=settings)


def reweighted(folder, change):
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)
    return folder


def plain(folder, **entries):
    """The same drafter in the flat form: `midlayer`, and the layer's settings beside the drafter's."""
    spec = json.loads((folder / CONFIG).read_text())
    kind = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": spec["draft_vocab_size"]}
    flat = spec["transformer_layer_config"] | kind
    flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": spec["eagle_aux_hidden_state_layer_ids"]}
    (folder / CONFIG).write_text(json.dumps(flat | entries))
    weights = load_file(folder / WEIGHTS)
    save_file({name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}, folder / WEIGHTS)
    return folder


def in_parts(folder, weight_map=None):
    """The weights in two files with an index."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names, where = sorted(weights), {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where if weight_map is None else weight_map(where)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    return folder


def deepspec(folder, net):
    """The network as DeepSpec, the authors' code, writes it: a flat config, layers by their block, the target's embeddings and head beside the weights."""
    config, layer = net.config, net.config.layer
    spec = {name: getattr(layer, name) for name in LAYER}
    spec |= {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "target_layer_ids": [n - 1 for n in config.target_layers],
        "num_target_layers": 3, "block_size": config.block, "mask_token_id": config.mask, "num_anchors": 512,
        "enable_confidence_head": bool(config.rank), "markov_rank": config.rank,
    }  # fmt: skip
    if config.rank:
        spec["markov_head_type"] = config.markov
    (folder / CONFIG).write_text(json.dumps(spec))
    weights = {name: tensor for name, tensor in net.state_dict().items() if name != "d2t"}
    size = layer.vocab_size, layer.hidden_size
    weights |= {"embed_tokens.weight": torch.randn(size), "lm_head.weight": torch.randn(size)}
    if config.rank:
        weights |= {
            "confidence_head.proj.weight": torch.randn(1, size[1]),
            "confidence_head.proj.bias": torch.randn(1),
        }
    save_file(weights, folder / WEIGHTS)
    return weights


def zlab(folder, net):
    """A DFlash 2 network as z-lab writes it: a flat config, with layers by their block."""
    config, layer = net.config, net.config.layer
    spec = {name: getattr(layer, name) for name in LAYER}
    nested = {
        "block_size": config.block, "mask_token_id": config.mask, "target_layer_ids": [n - 1 for n in config.target_layers],
        "conv_group_size": config.group, "conv_kernel_size": config.taps, "selector_rank": config.rank, "selector_top_k": config.candidates,
        "final_logit_softcapping": config.cap, "output_multiplier": config.scale,
    }  # fmt: skip
    kind = {"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False}
    spec |= kind | {"dflash_config": nested}
    (folder / CONFIG).write_text(json.dumps(spec))
    save_file({name: tensor for name, tensor in net.state_dict().items() if name != "d2t"}, folder / WEIGHTS)


def write_forms(folder, golden):
    """Write a drafter of each format into a folder of `folder`, by its name. `golden`: the tests' folders of DFlash and DSpark files."""
    target = hla.enable(small.llama(layers=3))
    forms = {name: folder / name for name in ("eagle3", "plain", "deepspec")}
    hla.save_drafter(eagle.drafter(target), forms["eagle3"], target)
    hla.save_drafter(eagle.drafter(target), forms["plain"], target)
    plain(forms["plain"])
    forms["deepspec"].mkdir()
    deepspec(forms["deepspec"], eagle.dflash_network(target, rank=4, from_anchor=True))
    others = {
        "dflash": "dflash_golden/one-layer", "dflash 2": "dflash2_golden/two-taps", "dspark": "dspark_golden/vanilla",
        "speculators' dflash": "dflash_windows_golden/causal", "recurrent dspark": "dspark_golden/rnn",
    }  # fmt: skip
    return forms | {name: golden / path for name, path in others.items()}
