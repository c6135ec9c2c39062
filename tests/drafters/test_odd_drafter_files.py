"""Drafters' files with odd settings, odd pickles or several parts: read as they are meant, or refused in one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import eagle, small
from support.eagle import refused

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.networks.eagle_network import Eagle1Network


def of_layers(spec):
    """The settings of a config's layers."""
    return spec.get("transformer_layer_config", spec)


ODD_LAYERS = {
    "an activation that is none": ({"hidden_act": "x"}, "KeyError: 'x'"),
    "angles of no known kind": ({"rope_parameters": {"rope_type": "zzz", "rope_theta": 1e4}}, "KeyError: 'zzz'"),
    "a text for a number": ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "TypeError"),
    "a factor as text": ({"rope_parameters": {"rope_type": "yarn", "factor": "2", "rope_theta": 1e4}}, "TypeError"),
    "angles without numbers": ({"rope_parameters": {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}}, "RoPE|ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "said"), ODD_LAYERS.values(), ids=ODD_LAYERS)
def test_settings_of_layers_that_transformers_stumbles_over(folder, entries, said):
    spec = json.loads((folder / "config.json").read_text())
    of_layers(spec).update(entries)
    (folder / "config.json").write_text(json.dumps(spec))
    line = refused(folder)
    assert any(its in line for its in said.split("|")) and "config.json" in line


ODD_PICKLES = {
    "a number for a name": (lambda its: its | {3: torch.ones(1)}, "expected tensors by name, got 3 with Tensor"),
    "a state_dict in a dict": (lambda its: {"state_dict": its}, "got 'state_dict' with dict: save the state_dict itself"),
    "sparse": (lambda its: its | {"fc.weight": its["fc.weight"].to_sparse()}, "fc.weight: expected a plain tensor"),
    "sparse by rows": (lambda its: its | {"fc.weight": its["fc.weight"].to_sparse_csr()}, "fc.weight: expected a plain tensor"),
    "without numbers": (lambda its: its | {"fc.weight": its["fc.weight"].to("meta")}, "fc.weight: expected a plain tensor"),
    "without a vocabulary": (lambda its: its | {"t2d": torch.ones(60, dtype=torch.bool, device="meta")}, "t2d: expected a plain tensor"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize(("change", "said"), ODD_PICKLES.values(), ids=ODD_PICKLES)
def test_odd_tensors_in_a_pickle(folder, change, said):
    torch.save(change(load_file(folder / "model.safetensors")), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert said in refused(folder, pickle=True)


def test_an_empty_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "is damaged: EOFError" in refused(folder, pickle=True) or "is damaged: Ran out" in refused(folder, pickle=True)  # fmt: skip


def in_parts(folder, weight_map=None):
    """The weights in two files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = sorted(weights), {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where if weight_map is None else weight_map(where)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_weights_in_several_files(folder):
    whole = hla.load_drafter(folder).state_dict()
    parts = hla.load_drafter(in_parts(folder)).state_dict()
    assert whole.keys() == parts.keys() and all(whole[name].equal(parts[name]) for name in whole)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refused(folder)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        (lambda where: dict.fromkeys(where, "../other/model.safetensors"), "weight_map: expected tensors' names"),
        (lambda where: dict.fromkeys(where, 3), "weight_map: expected tensors' names"),
        (lambda where: [], "weight_map: expected tensors' names"),
        (lambda where: where | {"more": "model-00001-of-00002.safetensors"}, "name other tensors (more)"),
    ],
    ids=["a path", "a number", "a list", "a tensor too many"],
)
def test_odd_indices_of_several_files(folder, weight_map, said):
    assert said in refused(in_parts(folder, weight_map))


def test_two_first_layers(folder):
    weights = load_file(folder / "model.safetensors")
    first = {name.replace("layers.0.", "midlayer."): its.clone() for name, its in weights.items()}
    save_file(weights | first, folder / "model.safetensors")
    assert "two first layers, midlayer.* and layers.0.*" in refused(folder)


def test_embeddings_of_fewer_tokens_than_the_target_reads(target):
    """Which would end in an index error at the first of the others."""
    few = hla.enable(small.llama(layers=3, vocab=20))
    for drafter in (eagle.drafter(few, kept=None), hla.Eagle3Drafter(eagle.eagle1(few))):
        with pytest.raises(
            ValueError, match=r"has embeddings of 20 tokens, and the target reads 97: it is another target's"
        ):
            target.generate(**small.one(), assistant_model=drafter, lossy_policy="strict", max_new_tokens=4)


EAGLE_1 = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act")  # fmt: skip


def write_eagle1(folder, net):
    layer = {name: getattr(net.config.layer, name) for name in EAGLE_1}
    spec = layer | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": net.config.bias}
    (folder / "config.json").write_text(json.dumps(spec))
    weights = {name: tensor for name, tensor in net.state_dict().items() if name != "d2t"}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("flags", [{}, {"own_embeddings": False, "bias": False}], ids=["plain", "without bias"])
def test_files_of_eagle_1(target, tmp_path, flags):
    net = eagle.eagle1(target, **flags)
    loaded = hla.load_drafter(write_eagle1(tmp_path, net)).network
    assert isinstance(loaded, Eagle1Network)
    text = small.one()["input_ids"][0]
    assert eagle.chain(target, loaded, text, 4)[1].equal(eagle.chain(target, net, text, 4)[1])


def test_a_model_is_no_drafter(target, tmp_path):
    target.save_pretrained(tmp_path / "model")
    assert "pass that as assistant_model itself" in refused(tmp_path / "model")
    narrow = hla.load_drafter(write_eagle1(tmp_path, eagle.eagle1(small.llama(layers=3, hidden_size=16))))
    with pytest.raises(ValueError, match="reads states of 16 numbers, and the target's have 32: it is another"):
        target.generate(**small.one(), assistant_model=narrow, lossy_policy="strict", max_new_tokens=4)


def test_in_int8_a_drafter_is_not_saved_and_stays_what_it_is(target, tmp_path):
    rounded = eagle.drafter(target).int8()
    assert rounded.int8() is rounded
    with pytest.raises(ValueError, match=r"in int8: save the one that int8\(\) was called on"):
        hla.save_drafter(rounded, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_without_a_policy(target):
    drafter = eagle.drafter(target)
    with pytest.raises(
        ValueError, match=r"the drafter Eagle3Drafter drafts in this package's loop.*lossy_policy=.strict."
    ):
        target.generate(**small.one(), assistant_model=drafter, max_new_tokens=4)
