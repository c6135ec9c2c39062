"""DFlash drafters: their blocks are those of the `dflash` package (made by dflash_golden/make.py), and the text is the target's whatever they draft."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import small, tiny
from support.distributions import REJECT, goodness, pair, sample, target_law
from support.eagle import dflash_network as network
from support.eagle import drafts, watched
from support.tiny import NEVER_EMITTED, some_eos
from transformers import TemperatureLogitsWarper

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.dflash import DFlashDrafter, DFlashModel


FOLDERS = sorted(path for path in Path(__file__).with_name("dflash_golden").iterdir() if path.is_dir())
RAGGED = (9, 1, 4, 14)


@torch.no_grad()
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_are_the_packages(folder, rows):
    """Also behind a partial acceptance, and beside rows of other lengths."""
    net, golden = hla.load_drafter(folder).network, load_file(folder / "golden.safetensors")
    embedding = torch.nn.Embedding.from_pretrained(golden["embedding"])
    head = torch.nn.Linear(*golden["head"].shape[::-1], bias=False)
    head.weight.data = golden["head"]
    model = DFlashModel(net, embedding, head, rows, 64, len(golden["head"]))
    states, ids = golden["states"].expand(rows, -1, -1), golden["ids"].expand(rows, -1)
    first = [7, 3, 5][:rows]  # tokens of each row's text; the first row is the golden one
    for step, lengths in enumerate((first, [n + 2 for n in first])):
        learned = [states[row, known : length - 1] for row, (known, length) in enumerate(zip(model.known, lengths, strict=True))]  # fmt: skip
        model.learn(torch.nn.utils.rnn.pad_sequence(learned, batch_first=True), [length - 1 for length in lengths])
        last = torch.stack([ids[row, length - 1] for row, length in enumerate(lengths)])[:, None]
        for place in range(net.config.drafts):
            found = model.feed(last, [1] * rows, keep=1)[0, 0]
            torch.testing.assert_close(found, golden["logits"][step, place], rtol=1e-5, atol=1e-5)
        model.rollback([length - 1 for length in lengths])


@torch.no_grad()
def draft_block(target, net, text):
    """The greedy block behind `text` (n,), without caches."""
    config = net.config
    out = target(text[None, :-1], output_hidden_states=True)
    states = torch.cat([out.hidden_states[layer] for layer in config.target_layers], dim=-1)
    model = DFlashModel(net, target.get_input_embeddings(), net.lm_head or target.get_output_embeddings(), 1, 256, config.layer.vocab_size)  # fmt: skip
    model.learn(states, [len(text) - 1])
    return [int(model.feed(text[None, -1:], [1], keep=1).argmax()) for _ in range(config.drafts)]


SETTINGS = {
    "plain": {},
    "two layers": {"layers": 2},
    "from the anchor": {"from_anchor": True},
    "its own head": {"draft_vocabulary": 40},
}


@pytest.mark.full(every=2)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("inputs", [small.one(), small.ragged()], ids=["one", "ragged"])
@pytest.mark.parametrize("flags", SETTINGS.values(), ids=SETTINGS)
def test_what_is_drafted_is_the_networks_block(monkeypatch, flags, inputs):
    """In each round, whatever was accepted before; no longer than a block."""
    target = hla.enable(small.llama(layers=3))
    drafter, seen = DFlashDrafter(network(target, **flags)), watched(monkeypatch)
    policy = hla.LossyPolicy(hla.TopK(55), hla.Constant(9))
    out = target.generate(**inputs, assistant_model=drafter, lossy_policy=policy, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)  # fmt: skip
    assert len({accepted for row in out.speculation.rows for _, accepted in row.steps}) > 1, (
        "some rounds accept a part"
    )
    drafted = 0
    for text, tokens in drafts(seen):
        assert len(tokens) <= drafter.network.config.drafts
        assert tokens == draft_block(target, drafter.network, text)[: len(tokens)]
        drafted += len(tokens)
    assert drafted > 12


@pytest.mark.full(every=6)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
def test_greedy_is_generate(name):
    model, width = tiny.shared(name), max(RAGGED)
    drafter = DFlashDrafter(network(hla.enable(model)))
    whole = tiny.greedy(model, tiny.prompts(RAGGED), eos_token_id=NEVER_EMITTED)
    eos = some_eos(whole, width)
    for end in (NEVER_EMITTED, eos):
        expected = tiny.greedy(model, tiny.prompts(RAGGED), eos_token_id=end)
        for policy in ("strict", {"stop": {"name": "constant", "gamma": 2}}, hla.SVIP(h=0.9)):
            assert tiny.assisted(model, tiny.prompts(RAGGED), drafter, policy, eos_token_id=end).sequences.equal(
                expected
            )


@cache
def sampling_drafter(draft_vocabulary):
    return DFlashDrafter(network(pair()[0], block=3, draft_vocabulary=draft_vocabulary))


@pytest.mark.full
@pytest.mark.nightly(every=2)
@pytest.mark.parametrize("draft_vocabulary", [None, 3], ids=["whole", "reduced"])
def test_samples_have_the_targets_law(draft_vocabulary):
    counts = sample(hla.LossyPolicy(hla.Strict(), hla.Constant(2)), {"temperature": 0.7, "assistant_model": sampling_drafter(draft_vocabulary)}, 3)  # fmt: skip
    assert goodness(counts, target_law((TemperatureLogitsWarper(0.7),))) > REJECT


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((FOLDERS[0] / name).read_bytes())
    return tmp_path


BAD = {
    "a window without a size": ({"layer_types": ["sliding_attention"], "sliding_window": None}, "sliding_window: expected"),
    "chunks": ({"layer_types": ["chunked_attention"]}, "layer_types: expected 1 of"),
    "a window of nothing": ({"dflash_config": {"target_layer_ids": [0, 2], "block_size": 4, "mask_token_id": 60, "use_swa": True, "swa_window_size": 0}}, "swa_window_size"),
    "causal as text": ({"is_causal": "yes"}, "is_causal"),
    "no layers": ({"dflash_config": {"block_size": 4, "mask_token_id": 60}, "num_target_layers": None}, "target_layer_ids: expected a list"),
    "no mask": ({"dflash_config": {"target_layer_ids": [0, 2], "block_size": 4}}, "mask_token_id"),
    "a block of one": ({"dflash_config": {"target_layer_ids": [0, 2], "block_size": 1, "mask_token_id": 60}}, "block_size"),
    "another kind": ({"architectures": ["DFlash2DraftModel"]}, "is of no known drafter"),
    "other layers": ({"num_hidden_layers": 2, "layer_types": None}, "does not fit its config.json"),
    "softcapping": ({"dflash_config": {"target_layer_ids": [0, 2], "block_size": 4, "mask_token_id": 60, "final_logit_softcapping": 20.0}}, "not supported"),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "message"), BAD.values(), ids=BAD)
def test_bad_configs(folder, entries, message):
    spec = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps({name: value for name, value in spec.items() if value is not None}))
    with pytest.raises(ValueError, match=message) as error:
        hla.load_drafter(folder)
    assert "\n" not in str(error.value)


def test_bad_weights_and_other_targets(folder):
    target = hla.enable(small.llama(layers=3))
    with pytest.raises(ValueError, match="reads states of 16 numbers, and the target's have 32") as error:
        target.generate(
            **small.one(), assistant_model=hla.load_drafter(folder), lossy_policy="strict", max_new_tokens=4
        )
    assert "\n" not in str(error.value)
    weights = load_file(folder / "model.safetensors")
    weights["fc.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="fc.weight holds NaN or infinities"):
        hla.load_drafter(folder)
