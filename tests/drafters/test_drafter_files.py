"""Drafters in files: every form is read as it is meant, and code in a folder never runs. Beside targets of any precision a network stays as it was loaded."""

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file
from support import eagle, small
from support.drafter_files import changed, in_parts, plain
from support.eagle import refused

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.base import Proposal
from hf_lossy_assist.drafters.trained import Eagle3Drafter
from hf_lossy_assist.policy.sharing import push


def drafts(target, drafter):
    """Return the tokens that a lax policy takes from it, whatever the target thinks: its own text."""
    policy = hla.LossyPolicy(hla.TopK(100), hla.Constant(5))
    return target.generate(**small.one(), assistant_model=drafter, lossy_policy=policy, max_new_tokens=12, do_sample=False)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize(
    "settings", [{}, {"draft_vocabulary": None, "layers": 2}, {"has_embeddings": False, "kind": "qwen3"}]
)
def test_what_is_saved_drafts_the_same(target, tmp_path, settings):
    drafter = eagle.drafter(target, **settings)
    hla.save_drafter(drafter, tmp_path / "its", target)
    loaded = hla.load_drafter(tmp_path / "its")
    assert loaded.source == str(tmp_path / "its")
    assert drafts(target, loaded).equal(drafts(target, drafter))


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_the_plain_form_drafts_the_same(target, folder):
    """As SpecForge writes it, and as EAGLE does."""
    expected = drafts(target, hla.load_drafter(folder))
    assert drafts(target, hla.load_drafter(plain(folder))).equal(expected)
    assert drafts(target, hla.load_drafter(changed(folder, architectures=["LlamaForCausalLM"]))).equal(expected)


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
    assert "is damaged or does not fit" in refused(folder, pickle=True)


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
    for make in (hla.Eagle3Drafter, hla.DFlashDrafter, hla.DFlash2Drafter, hla.DSparkDrafter):
        with pytest.raises(TypeError, match="load one with load_drafter"):
            make(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected an Eagle3Drafter or a DSparkDrafter"):
        hla.save_drafter("drafter", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_weights_in_several_files(folder):
    whole = hla.load_drafter(folder).state_dict()
    parts = hla.load_drafter(in_parts(folder)).state_dict()
    assert whole.keys() == parts.keys() and all(whole[name].equal(parts[name]) for name in whole)


def test_embeddings_of_fewer_tokens_than_the_target_reads(target):
    """Unrefused, they end in an index error at the first token that they lack."""
    few = hla.enable(small.llama(layers=3, vocab=20))
    says = r"has embeddings of 20 tokens, and the target reads 97: it is another target's"
    drafter = eagle.drafter(few, draft_vocabulary=None)
    with pytest.raises(ValueError, match=says):
        target.generate(**small.one(), assistant_model=drafter, lossy_policy="strict", max_new_tokens=4)


def test_a_model_is_no_drafter(target, tmp_path):
    target.save_pretrained(tmp_path / "model")
    assert "pass a model as assistant_model itself" in refused(tmp_path / "model")


def test_in_int8_a_drafter_is_not_saved_and_stays_what_it_is(target, tmp_path):
    rounded = eagle.drafter(target).int8()
    assert rounded.int8() is rounded
    with pytest.raises(ValueError, match=r"in int8: save the one that int8\(\) was called on"):
        hla.save_drafter(rounded, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_without_a_policy(target):
    drafter = eagle.drafter(target)
    says = r"the drafter Eagle3Drafter drafts for a policy alone.*lossy_policy=.strict."
    with pytest.raises(ValueError, match=says):
        target.generate(**small.one(), assistant_model=drafter, max_new_tokens=4)


@pytest.fixture(scope="module")
def targets():
    one = hla.enable(small.llama(layers=3).float())
    return one, hla.enable(copy.deepcopy(one).to(torch.bfloat16))


def written(target, drafter):
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    return target.generate(**small.one(), assistant_model=drafter, lossy_policy="strict", **settings)


def test_its_weights_stay_and_a_copy_follows_them(targets):
    """Also of a network that was made in inference mode."""
    with torch.inference_mode():
        drafter = eagle.drafter(targets[0])
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    for target in (targets[1], targets[0], targets[1]):
        text = written(target, drafter).sequences
        assert text.equal(target.generate(**small.one(), max_new_tokens=12, do_sample=False))
        after = drafter.state_dict()
        assert all(after[name].dtype == before[name].dtype and after[name].equal(before[name]) for name in before)
    drafter = eagle.drafter(targets[0])
    old = drafter.beside(targets[1])
    assert old.dtype == torch.bfloat16 and old is drafter.beside(targets[1])  # copied once
    assert drafter.beside(targets[0]) is drafter
    with torch.no_grad():
        drafter.network.fc.weight.add_(1.0)
    new = drafter.beside(targets[1])
    assert new is not old and new.network.fc.weight.equal(drafter.network.fc.weight.to(torch.bfloat16))
