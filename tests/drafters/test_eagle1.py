"""Drafters of EAGLE-1 and 2: chains on the target's last states, read through its own head."""

import json

import pytest
import torch
from safetensors.torch import save_file
from support import small
from support.eagle import drafts, watched
from support.eagle import eagle1 as network

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.eagle import Eagle3Drafter
from hf_lossy_assist.drafters.networks.eagle_network import Eagle1Network


@pytest.fixture(scope="module")
def target():
    return hla.enable(small.llama(layers=3))


@torch.no_grad()
def chain(target, net, text, gamma):
    """`gamma` greedily drafted tokens behind `text` (n,), without caches."""
    states = target(text[None, :-1], output_hidden_states=True).hidden_states[-1]  # which are normed
    embedding, tokens = net.embed_tokens or target.get_input_embeddings(), text[1:].tolist()
    for _ in range(gamma):
        count = len(tokens)
        mask = torch.full((count, count), torch.finfo(states.dtype).min, dtype=states.dtype).triu(1)[None, None]
        own, read = net(embedding(torch.tensor([tokens])), states, torch.arange(count)[None], mask, None)
        tokens.append(int(target.get_output_embeddings()(read[0, -1]).argmax()))
        states = torch.cat([states, own[:, -1:]], dim=1)
    return tokens[len(text) - 1 :]


@pytest.mark.full(every=3)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("inputs", [small.one(), small.ragged()], ids=["one", "ragged"])
@pytest.mark.parametrize(
    "flags", [{}, {"layers": 2}, {"own_embeddings": False, "bias": False}], ids=["plain", "two layers", "without bias"]
)
def test_a_chain_is_the_networks_own_without_caches(target, monkeypatch, flags, inputs):
    drafter, seen = Eagle3Drafter(network(target, **flags)), watched(monkeypatch)
    policy = hla.LossyPolicy(hla.TopK(55), hla.Constant(4))
    given = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    target.generate(**inputs, assistant_model=drafter, lossy_policy=policy, **given)
    drafted = 0
    for text, tokens in drafts(seen):
        assert tokens == chain(target, drafter.network, text, len(tokens))
        drafted += len(tokens)
    assert drafted > 12
    strict = target.generate(**inputs, assistant_model=drafter, lossy_policy="strict", **given)
    assert strict.sequences.equal(target.generate(**inputs, **given).sequences)


def written(folder, net, **entries):
    layer = {name: getattr(net.config.layer, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act")}  # fmt: skip
    spec = layer | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": net.config.bias} | entries
    (folder / "config.json").write_text(json.dumps(spec))
    save_file({name: its for name, its in net.state_dict().items() if name != "d2t"}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("flags", [{}, {"own_embeddings": False, "bias": False}], ids=["plain", "without bias"])
def test_files(target, tmp_path, flags):
    net = network(target, **flags)
    loaded = hla.load_drafter(written(tmp_path, net)).network
    assert isinstance(loaded, Eagle1Network)
    text = small.one()["input_ids"][0]
    assert chain(target, loaded, text, 4) == chain(target, net, text, 4)


def test_a_model_is_no_drafter(target, tmp_path):
    target.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="holds no drafter .* pass that as assistant_model itself") as error:
        hla.load_drafter(tmp_path / "model")
    assert "\n" not in str(error.value)
    narrow = network(small.llama(layers=3, hidden_size=16))
    with pytest.raises(
        ValueError, match="reads states of 16 numbers, and the target's have 32: it is another target's"
    ):
        target.generate(**small.one(), assistant_model=hla.load_drafter(written(tmp_path, narrow)), lossy_policy="strict", max_new_tokens=4)  # fmt: skip
