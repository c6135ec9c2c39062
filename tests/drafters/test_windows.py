"""Drafters with sliding windows are read and run as they were trained: what a layer sees is written out here key by key. Texts that outgrow a drafter are told once."""

import json
from pathlib import Path

import torch
from support import eagle, small
from support.eagle import refused

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.io.formats import read_windows
from hf_lossy_assist.drafters.networks.base import CAUSAL, AttentionWindow, HiddenStateModel
from hf_lossy_assist.drafters.networks.dflash_network import rotated


SLIDING, FULL = "sliding_attention", "full_attention"
SIGHTS = {
    "speculators": (AttentionWindow(3, causal=True), AttentionWindow()), "speculators, not causal": (AttentionWindow(3), AttentionWindow()),
    "z-lab": (AttentionWindow(2, moves=True, causal=True), AttentionWindow()), "ModelOpt": (AttentionWindow(2, moves=True),) * 2, "one token": (AttentionWindow(0, causal=True),) * 2,
}  # fmt: skip


def sees(sight, begin, query, key):
    """Whether the token at `query`, of a block that begins at `begin`, sees the one at `key`."""
    if key >= begin:
        return key <= query or not sight.causal
    return sight.reach is None or key >= (query if sight.moves else begin) - sight.reach


@torch.no_grad()
def block_without_cache(net, embedding, head, states, last):
    """The logits of a block behind a text with `states` (1, T, ·) and the token `last`, (drafts, V), by attention written out."""
    config, begin = net.config, states.shape[1]
    fused, ids = net.hidden_norm(net.fc(states)), torch.tensor([[last] + [config.mask] * (config.block - 1)])
    out, places = embedding(ids), torch.arange(begin + config.block)
    cos, sin = net.rotary_emb(fused, places[None])
    for layer, sight in zip(net.layers, config.sights, strict=True):
        attention, normed = layer.self_attn, layer.input_layernorm(out)
        keys, values = attention.keys(torch.cat([fused, normed], dim=1), cos, sin)
        queries = attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim))).transpose(1, 2)
        queries = rotated(queries, cos[:, begin:], sin[:, begin:])
        groups = queries.shape[1] // keys.shape[1]
        scores = queries @ keys.repeat_interleave(groups, dim=1).mT * attention.scaling
        seen = torch.tensor([[sees(sight, begin, begin + q, int(k)) for k in places] for q in range(config.block)])
        read = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ values.repeat_interleave(groups, dim=1)
        out = out + attention.o_proj(read.transpose(1, 2).flatten(2))
        out = out + layer.mlp(layer.post_attention_layernorm(out))
    return head(net.norm(out)[0, config.first :])


@torch.no_grad()
def test_a_block_is_that_of_attention_written_out():
    """Behind texts of three lengths, and behind a partial acceptance."""
    for sights in SIGHTS.values():
        target = small.llama(layers=3)
        net = eagle.dflash_network(target, layers=2, sights=sights)
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        model = HiddenStateModel(net, embedding, head, 3, 64, head.out_features)
        states = torch.randn(3, 12, 3 * 32, dtype=net.dtype)
        for known in ([9, 2, 5], [11, 3, 8]):
            new = [states[row, had:now] for row, (had, now) in enumerate(zip(model.known, known, strict=True))]
            model.take(torch.nn.utils.rnn.pad_sequence(new, batch_first=True), known)
            last = torch.tensor([[7], [8], [9]])
            model.read(last.expand(-1, 1 + model.behind))  # DFlash reads the last token alone
            found = torch.stack([model.step(last) for _ in range(net.config.drafts)], dim=1)
            for row, count in enumerate(known):
                expected = block_without_cache(net, embedding, head, states[row, None, :count], int(last[row]))
                torch.testing.assert_close(found[row], expected, rtol=1e-6, atol=1e-6)


CONFIGS = {
    "nothing": ({}, [None, None]),
    "kinds": ({"layer_types": [FULL, SLIDING], "sliding_window": 7}, [None, 7]),
    "kinds, and a window that is not in use": ({"layer_types": [FULL, FULL], "sliding_window": 7}, [None, None]),
    "Llama's window alone": ({"sliding_window": 7}, [7, 7]),
    "Qwen's window alone": ({"sliding_window": 7, "model_type": "qwen3"}, [None, None]),
    "Qwen's, not in use": ({"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 1}, [None, None]),
    "Qwen's, from a layer on": ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, [None, 7]),
}  # fmt: skip


def test_windows_of_a_config():
    for given, expected in CONFIGS.values():
        assert read_windows(given, "config.json", 2) == expected
    for name in ("causal", "not-causal"):  # their blocks: test_dflash.py
        sights = hla.load_drafter(Path(__file__).parent / "dflash_windows_golden" / name).network.config.sights
        assert sights == (AttentionWindow(3, causal=name == "causal"), AttentionWindow())


def written(folder, **layer):
    """config.json with other settings of its layers."""
    spec = json.loads((folder / "config.json").read_text())
    spec["transformer_layer_config"] |= layer
    (folder / "config.json").write_text(json.dumps(spec))
    return folder


def test_files_of_eagle(folder):
    """A window counts the last pair, as Transformers' do, in either form."""
    assert hla.load_drafter(folder).network.config.sights == (CAUSAL,)
    drafter = hla.load_drafter(written(folder, layer_types=[SLIDING], sliding_window=4))
    hla.save_drafter(drafter, folder / "again")
    for loaded in (drafter, hla.load_drafter(folder / "again")):
        assert loaded.network.config.sights == (AttentionWindow(3, causal=True),)
    spec = json.loads((folder / "config.json").read_text())
    flat = {name: spec[name] for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    flat |= spec["transformer_layer_config"] | {"architectures": ["LlamaForCausalLMEagle3"]}
    (folder / "config.json").write_text(json.dumps(flat))
    assert hla.load_drafter(folder).network.config.sights == (AttentionWindow(3, causal=True),)


def test_wrong_windows(folder):
    for name, value in (("sliding_window", None), ("sliding_window", 2.5), ("layer_types", "sliding")):
        line = refused(written(folder, **{"layer_types": [SLIDING], "sliding_window": 4, name: value}))
        assert f"config.json: {name}: expected" in line


DFLASH = {
    "z-lab": ({"layer_types": [SLIDING], "sliding_window": 4}, {}, AttentionWindow(3, moves=True, causal=True)),
    "z-lab's 2, not causal": ({"layer_types": [SLIDING], "sliding_window": 4, "is_causal": False}, {}, AttentionWindow(3, moves=True)),
    "ModelOpt": ({"sliding_window": 4}, {"use_swa": True, "swa_window_size": 6, "causal": False}, AttentionWindow(5, moves=True)),
    "MiMo": ({"layer_types": [FULL]}, {"causal": True}, AttentionWindow(causal=True)),
}  # fmt: skip


def test_files_of_dflash(tmp_path):
    for file in Path(__file__).parent.glob("dflash_golden/one-layer/*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spec = json.loads((tmp_path / "config.json").read_text())
    for kind, (entries, nested, sight) in DFLASH.items():
        changed = spec | entries | {"dflash_config": spec["dflash_config"] | nested}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        assert hla.load_drafter(tmp_path).network.config.sights == (sight,), kind
