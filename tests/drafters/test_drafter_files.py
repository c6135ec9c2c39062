"""Drafters in files: every form is read as it is meant, code in a folder never runs, and whatever is wrong or odd ends in one line."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import eagle, small
from support.eagle import refused

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.eagle import Eagle3Drafter
from hf_lossy_assist.drafters.hidden_state import Proposal
from hf_lossy_assist.drafters.networks.eagle_network import Eagle1Network
from hf_lossy_assist.policy.sharing import push


def changed(folder, **entries):
    """config.json with other entries; None takes one away."""
    file = folder / "config.json"
    spec = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({name: value for name, value in spec.items() if value is not None}))
    return folder


def reweighted(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def plain(folder, **entries):
    """The same drafter in the flat form: `midlayer`, and the layer's settings beside the drafter's."""
    spec = json.loads((folder / "config.json").read_text())
    flat = spec["transformer_layer_config"] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": spec["draft_vocab_size"],
    }
    flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": spec["eagle_aux_hidden_state_layer_ids"]}
    (folder / "config.json").write_text(json.dumps(flat | entries))
    weights = load_file(folder / "model.safetensors")
    save_file({name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}, folder / "model.safetensors")  # fmt: skip
    return folder


def drafts(target, drafter):
    """Return the tokens that a lax policy takes from it, whatever the target thinks: its own text."""
    policy = hla.LossyPolicy(hla.TopK(100), hla.Constant(5))
    return target.generate(**small.one(), assistant_model=drafter, lossy_policy=policy, max_new_tokens=12, do_sample=False)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize(
    "settings", [{}, {"draft_vocabulary": None}, {"has_embeddings": False}, {"layers": 2}, {"kind": "qwen3"}]
)
def test_what_is_saved_drafts_the_same(target, tmp_path, settings):
    drafter = eagle.drafter(target, **settings)
    hla.save_drafter(drafter, tmp_path / "its", target)
    loaded = hla.load_drafter(tmp_path / "its")
    assert loaded.source == str(tmp_path / "its")
    assert drafts(target, loaded).equal(drafts(target, drafter))


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "LlamaForCausalLM"], ids=["SpecForge", "EAGLE"])
def test_the_plain_form_drafts_the_same(target, folder, name):
    expected = drafts(target, hla.load_drafter(folder))
    assert drafts(target, hla.load_drafter(plain(folder, architectures=[name]))).equal(expected)


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_pickles_are_read_only_on_request_and_only_tensors(target, folder):
    expected = drafts(target, hla.load_drafter(folder))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "pickle=True" in refused(folder)
    assert drafts(target, hla.load_drafter(folder, pickle=True)).equal(expected)

    class Bomb:
        def __reduce__(self):
            return (exit, ("the pickle ran",))

    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump(Bomb(), file)
    assert "more than tensors" in refused(folder, pickle=True)
    torch.save([1, 2], folder / "pytorch_model.bin")
    assert "expected tensors by name, got list" in refused(folder, pickle=True)


def test_code_of_a_folder_never_runs(folder):
    (folder / "config.py").write_text("raise SystemExit('code of the folder ran')")
    changed(folder, auto_map={"": "config.Eagle3SpeculatorConfig", "AutoConfig": "config.Eagle3SpeculatorConfig"})
    assert isinstance(hla.load_drafter(folder), Eagle3Drafter)


def test_pushed_and_loaded_from_the_hub(hub, folder):
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A drafter\n")
    push(folder, "org/drafter")
    loaded = hla.load_drafter("org/drafter")
    assert isinstance(loaded, Eagle3Drafter) and loaded.source == "org/drafter"
    with pytest.raises(ValueError, match="neither a folder here nor|there is no folder"):
        hla.load_drafter("nothing")
    with pytest.raises(TypeError, match="^load_drafter: expected a folder, or org/name on the Hub, got None$"):
        hla.load_drafter(None)


def test_another_targets(folder, target):
    other = hla.enable(small.llama(layers=3, hidden_size=48))
    settings = {"lossy_policy": "strict", "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(
        ValueError, match=r"reads states of 32 numbers, and the target's have 48: it is another target's$"
    ):
        other.generate(**small.one(), assistant_model=hla.load_drafter(folder), **settings)
    few = hla.enable(small.llama(layers=3, vocab=40))
    with pytest.raises(ValueError, match=r"knows token ids up to .*: it is another target's"):
        few.generate(torch.tensor([[3, 4]]), assistant_model=hla.load_drafter(folder), **settings)
    with pytest.raises(ValueError, match="layer 9 is asked for, and .* has 3 blocks"):
        deep = hla.load_drafter(changed(folder, eagle_aux_hidden_state_layer_ids=[0, 1, 9]))
        target.generate(**small.one(), assistant_model=deep, **settings)


BAD_CONFIGS = {
    "a DFlash": ({"speculators_model_type": "dflash"}, "layers of model_type 'llama' are not known here, which has qwen3"),
    "z-lab's DFlash 2": ({"speculators_model_type": None, "architectures": ["DFlash2DraftModel"]}, "is of no known drafter (architectures ['DFlash2DraftModel'])"),
    "an ordinary model": ({"speculators_model_type": None, "architectures": ["Qwen2ForCausalLM"]}, "is of no known drafter"),
    "no layers": ({"transformer_layer_config": None}, "transformer_layer_config: expected an object"),
    "layers of another kind": ({"transformer_layer_config": {"model_type": "mamba"}}, "layers of model_type 'mamba' are not known here"),
    "sizes without end": ({"transformer_layer_config": {"hidden_size": 10**9}}, "hidden_size"),
    "a size of none": ({"transformer_layer_config": {"model_type": "llama", "hidden_size": 32}}, "intermediate_size is missing"),
    "a flag that is none": ({"norm_before_fc": "yes"}, "norm_before_fc"),
    "layers as text": ({"eagle_aux_hidden_state_layer_ids": "2, 3"}, "expected a list of layers"),
    "a layer below none": ({"eagle_aux_hidden_state_layer_ids": [-1, 2]}, "eagle_aux_hidden_state_layer_ids"),
    "a larger vocabulary than the target's": ({"draft_vocab_size": 10**6}, "draft_vocab_size"),
    "another reduced vocabulary": ({"draft_vocab_size": 39}, "does not fit its config.json"),
    "other widths": ({"target_hidden_size": 64}, "does not fit its config.json"),
    "a setting that is not there": ({"norm_before_fc": True}, "does not fit its config.json"),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_bad_configs(folder, entries, message):
    assert message in refused(changed(folder, **entries))


def without(name):
    return lambda weights: weights.pop(name)


def filled(name, value):
    return lambda weights: weights.__setitem__(name, weights[name].clone().fill_(value))


BAD_WEIGHTS = {
    "a tensor is missing": (without("layers.0.hidden_norm.weight"), "Missing key"),
    "the head is missing": (without("lm_head.weight"), "Missing key"),
    "one too many": (lambda weights: weights.__setitem__("tree.weight", torch.zeros(2)), "Unexpected key"),
    "NaN": (filled("fc.weight", float("nan")), "fc.weight holds NaN or infinities"),
    "infinities": (filled("embed_tokens.weight", float("inf")), "embed_tokens.weight holds NaN or infinities"),
    "whole numbers": (lambda weights: weights.__setitem__("fc.weight", weights["fc.weight"].to(torch.int8)), "fc.weight is of dtype torch.int8"),
    "a token twice": (filled("d2t", 0), "d2t and t2d name other tokens"),
    "tokens outside": (filled("d2t", 10**6), "d2t names tokens twice, or outside"),
    "below zero": (filled("d2t", -5), "d2t names tokens twice, or outside"),
    "no tokens": (lambda weights: weights.__setitem__("d2t", weights["d2t"].float()), "d2t is of dtype torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_bad_weights(folder, change, message):
    assert message in refused(reweighted(folder, change))


def test_files_that_are_no_whole_files(folder, tmp_path):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "is not a whole safetensors file" in refused(folder)
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json nor pytorch_model.bin" in refused(folder)
    (folder / "config.json").write_text("[1]")
    assert "expected an object" in refused(folder)
    shutil.rmtree(folder)
    assert "there is no folder" in refused(folder.name)


def test_nothing_lossy_that_files_suggest_is_used_unasked(target, folder):
    drafter = eagle.drafter(target)
    lax = Eagle3Drafter(drafter.network, None, Proposal(4, 60, 1000.0))
    hla.save_drafter(lax, folder, target)
    loaded = hla.load_drafter(folder)
    assert loaded.proposal == Proposal(4, 60, 1000.0)
    settings = {"max_new_tokens": 16, "do_sample": False}
    expected = target.generate(**small.one(), **settings)
    assert target.generate(**small.one(), assistant_model=loaded, lossy_policy="strict", **settings).equal(expected)
    policy = hla.as_policy(loaded.proposal.policy)
    assert policy == hla.LossyPolicy(hla.TopKTolerance(60, 1000.0), hla.Constant(4))
    with pytest.warns(UserWarning, match="this policy is lossy"):
        other = target.generate(**small.one(), assistant_model=loaded, lossy_policy=policy, **settings)
    assert not other.equal(expected)
    assert hla.as_policy(Proposal().policy) == hla.LossyPolicy(hla.Strict(), hla.Constant(5))


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_deepspecs_form_drafts_the_same(target, tmp_path):
    """DeepSpec numbers layers by the block whose output it is, and has the whole vocabulary."""
    drafter = eagle.drafter(target, kind="qwen3", draft_vocabulary=None, target_layers=(1, 2))
    hla.save_drafter(drafter, tmp_path / "its", target)
    spec = json.loads((tmp_path / "its" / "config.json").read_text())
    flat = spec["transformer_layer_config"] | {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1], "ttt_length": 7}  # fmt: skip
    (tmp_path / "its" / "config.json").write_text(json.dumps(flat))
    assert drafts(target, hla.load_drafter(tmp_path / "its")).equal(drafts(target, drafter))


def test_what_is_no_drafter(tmp_path):
    for make in (hla.Eagle3Drafter, hla.DFlashDrafter, hla.DSparkDrafter):
        with pytest.raises(TypeError, match="load one with load_drafter"):
            make(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected an Eagle3Drafter or a DSparkDrafter"):
        hla.save_drafter("drafter", tmp_path / "x")
    assert not (tmp_path / "x").exists()


ODD_LAYERS = {
    "an activation that is none": ({"hidden_act": "x"}, "KeyError: 'x'"),
    "angles of no known kind": ({"rope_parameters": {"rope_type": "zzz", "rope_theta": 1e4}}, "KeyError: 'zzz'"),
    "a text for a number": ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "TypeError"),
    "a factor as text": ({"rope_parameters": {"rope_type": "yarn", "factor": "2", "rope_theta": 1e4}}, "TypeError"),
    "angles without numbers": ({"rope_parameters": {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}}, "RoPE|ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "message"), ODD_LAYERS.values(), ids=ODD_LAYERS)
def test_settings_of_layers_that_transformers_stumbles_over(folder, entries, message):
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    line = refused(changed(folder, transformer_layer_config=layer | entries))
    assert any(part in line for part in message.split("|")) and "config.json" in line


ODD_PICKLES = {
    "a number for a name": (lambda weights: weights | {3: torch.ones(1)}, "expected tensors by name, got 3 with Tensor"),
    "a state_dict in a dict": (lambda weights: {"state_dict": weights}, "got 'state_dict' with dict: save the state_dict itself"),
    "sparse": (lambda weights: weights | {"fc.weight": weights["fc.weight"].to_sparse()}, "fc.weight: expected a plain tensor"),
    "sparse by rows": (lambda weights: weights | {"fc.weight": weights["fc.weight"].to_sparse_csr()}, "fc.weight: expected a plain tensor"),
    "without numbers": (lambda weights: weights | {"fc.weight": weights["fc.weight"].to("meta")}, "fc.weight: expected a plain tensor"),
    "without a vocabulary": (lambda weights: weights | {"t2d": torch.ones(60, dtype=torch.bool, device="meta")}, "t2d: expected a plain tensor"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize(("change", "message"), ODD_PICKLES.values(), ids=ODD_PICKLES)
def test_odd_tensors_in_a_pickle(folder, change, message):
    torch.save(change(load_file(folder / "model.safetensors")), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert message in refused(folder, pickle=True)


def test_an_empty_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    line = refused(folder, pickle=True)
    assert "is damaged: EOFError" in line or "is damaged: Ran out" in line


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
    ("weight_map", "message"),
    [
        (lambda where: dict.fromkeys(where, "../other/model.safetensors"), "weight_map: expected tensors' names"),
        (lambda where: dict.fromkeys(where, 3), "weight_map: expected tensors' names"),
        (lambda where: [], "weight_map: expected tensors' names"),
        (lambda where: where | {"more": "model-00001-of-00002.safetensors"}, "name other tensors (more)"),
    ],
    ids=["a path", "a number", "a list", "a tensor too many"],
)
def test_odd_indices_of_several_files(folder, weight_map, message):
    assert message in refused(in_parts(folder, weight_map))


def test_two_first_layers(folder):
    weights = load_file(folder / "model.safetensors")
    first = {name.replace("layers.0.", "midlayer."): tensor.clone() for name, tensor in weights.items()}
    save_file(weights | first, folder / "model.safetensors")
    assert "two first layers, midlayer.* and layers.0.*" in refused(folder)


def test_embeddings_of_fewer_tokens_than_the_target_reads(target):
    """Unrefused, they end in an index error at the first token that they lack."""
    few = hla.enable(small.llama(layers=3, vocab=20))
    says = r"has embeddings of 20 tokens, and the target reads 97: it is another target's"
    for drafter in (eagle.drafter(few, draft_vocabulary=None), hla.Eagle3Drafter(eagle.eagle1(few))):
        with pytest.raises(ValueError, match=says):
            target.generate(**small.one(), assistant_model=drafter, lossy_policy="strict", max_new_tokens=4)


EAGLE_1 = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act")  # fmt: skip


def write_eagle1(folder, net):
    layer = {name: getattr(net.config.layer, name) for name in EAGLE_1}
    spec = layer | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": net.config.bias}
    (folder / "config.json").write_text(json.dumps(spec))
    weights = {name: tensor for name, tensor in net.state_dict().items() if name != "d2t"}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("flags", [{}, {"has_embeddings": False, "bias": False}], ids=["plain", "without bias"])
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
    says = r"the drafter Eagle3Drafter drafts in this package's loop.*lossy_policy=.strict."
    with pytest.raises(ValueError, match=says):
        target.generate(**small.one(), assistant_model=drafter, max_new_tokens=4)
