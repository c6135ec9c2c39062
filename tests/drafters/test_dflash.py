"""DFlash, DFlash 2 and DSpark drafters: their blocks are those of the packages that train them (README.md), and the text is the target's
whatever they draft.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import small
from support.drafter_files import deepspec, zlab
from support.eagle import dflash_network as network
from support.eagle import drafts, watched
from support.enumeration import off

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.networks.base import AttentionWindow, HiddenStateModel
from hf_lossy_assist.drafters.networks.corrected_networks import DFlash2Network
from hf_lossy_assist.drafters.trained import DFlash2Drafter, DFlashDrafter, DSparkDrafter


KINDS = {"dflash": DFlashDrafter, "dflash2": DFlash2Drafter, "dspark": DSparkDrafter}
FOLDERS = {
    path: kind
    for name, kind in (KINDS | {"dflash_windows": DFlashDrafter}).items()
    for path in sorted(Path(__file__).with_name(f"{name}_golden").iterdir())
    if path.is_dir() and not path.name.startswith("_")
}
SECOND = {"group": 8, "rank": 4, "candidates": 5}  # DFlash 2's settings


@torch.no_grad()
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name}, {path.name}")
def test_blocks_are_the_packages(folder, rows=3):
    """Also behind a partial acceptance, and beside rows of other lengths. DSpark's and DFlash 2's places follow the tokens of the text."""
    drafter = hla.load_drafter(folder)
    net, golden = drafter.network, load_file(folder / "golden.safetensors")
    assert type(drafter) is FOLDERS[folder]
    embedding = torch.nn.Embedding.from_pretrained(golden["embedding"])
    if (head := net.lm_head) is None:
        head = torch.nn.Linear(*golden["head"].shape[::-1], bias=False)
        head.weight.data = golden["head"]
    model = HiddenStateModel(net, embedding, head, rows, 64, len(golden["embedding"]))
    states, ids = golden["states"].expand(rows, -1, -1), golden["ids"].expand(rows, -1)
    first = [7, 3, 5][:rows]  # tokens of each row's text; the first row is the golden one
    for step, lengths in enumerate((first, [n + 2 for n in first])):
        learned = [states[row, known : length - 1] for row, (known, length) in enumerate(zip(model.known, lengths, strict=True))]  # fmt: skip
        begins = [known for known in model.known]
        model.take(torch.nn.utils.rnn.pad_sequence(learned, batch_first=True), [length - 1 for length in lengths])
        texts = [ids[row, known:length] for row, (known, length) in enumerate(zip(begins, lengths, strict=True))]
        model.read(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
        for place in range(net.config.drafts):
            at = [(length - 1 + place) % ids.shape[1] for length in lengths]  # DFlash reads the first of them alone
            last = ids[range(rows), at][:, None]
            found = model.step(last)[0]
            found = found[net.target_ids] if net.config.reduced else found
            torch.testing.assert_close(found, golden["logits"][step, place], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def draft_block(target, net, text):
    """The greedy block behind `text` (n,), without caches of earlier rounds."""
    config = net.config
    out = target(text[None, :-1], output_hidden_states=True)
    states = torch.cat([out.hidden_states[layer] for layer in config.target_layers], dim=-1)
    model = HiddenStateModel(net, target.get_input_embeddings(), net.lm_head or target.get_output_embeddings(), 1, 256, config.layer.vocab_size)  # fmt: skip
    model.take(states, [len(text) - 1])
    model.read(text[None])
    tokens = [int(text[-1])]
    for _ in range(config.drafts):
        tokens.append(int(model.step(torch.tensor([tokens[-1:]])).argmax()))
    return tokens[1:]


SETTINGS = {
    "plain": {}, "two layers": {"layers": 2}, "from the anchor": {"from_anchor": True},
    "its own head": {"draft_vocabulary": 40}, "dspark": {"rank": 4, "from_anchor": True},
    "dspark, gated": {"rank": 4, "markov": "gated", "draft_vocabulary": 40},
    "dspark, recurrent": {"rank": 4, "markov": "rnn", "from_anchor": True}, "dflash 2": SECOND | {"layers": 2},
    "dflash 2 of one tap, capped": SECOND | {"taps": 1, "scale": 0.2, "cap": 3.0},
}  # fmt: skip


def made(target, **flags):
    net = network(target, **flags)
    if isinstance(net, DFlash2Network):
        return DFlash2Drafter(net)
    return DSparkDrafter(net) if hasattr(net, "markov_head") else DFlashDrafter(net)


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize(
    ("flags", "inputs"),
    [
        pytest.param(flags, small.ragged() if n % 2 else small.one(), marks=[pytest.mark.full] * (n % 4 > 0), id=name)
        for n, (name, flags) in enumerate(SETTINGS.items())
    ],
)
def test_what_is_drafted_is_the_networks_block(monkeypatch, flags, inputs):
    """In each round, whatever was accepted before; no longer than a block."""
    target = hla.enable(small.llama(layers=3))
    drafter, seen = made(target, **flags), watched(monkeypatch)
    policy = hla.LossyPolicy(hla.TopK(45), hla.Constant(9))
    settings = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    out = target.generate(**inputs, assistant_model=drafter, lossy_policy=policy, **settings)
    counts = {accepted for row in out.speculation.rows for _, accepted in row.steps}
    assert len(counts) > 1, "some rounds accept a part"
    drafted = 0
    for text, tokens in drafts(seen):
        assert len(tokens) <= drafter.network.config.drafts
        assert tokens == draft_block(target, drafter.network, text)[: len(tokens)]
        drafted += len(tokens)
    assert drafted > 12


DISTRIBUTIONS = {
    "a reduced vocabulary": (3, hla.Constant(2)),
    "DFlash 2": (None, hla.SVIP(h=0.9, max_draft=2)),
    "blocks": (None, hla.LossyPolicy(hla.BlockVerification(), hla.Constant(2))),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (n > 0)) for n, name in enumerate(DISTRIBUTIONS)]
)
def test_the_distribution_of_texts(name):
    """Exactly, of two rows together, with an end token: each token's q is the corrected one, DSpark's or DFlash 2's."""
    draft_vocabulary, policy = DISTRIBUTIONS[name]
    target = hla.enable(small.llama(vocab=4).float())
    flags = SECOND | {"candidates": 2} if name == "DFlash 2" else {"rank": 2, "from_anchor": True}
    drafter = made(target, **flags, block=3, draft_vocabulary=draft_vocabulary)
    ids, mask = torch.tensor([[0, 3, 2], [3, 2, 3]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    prompts = {"input_ids": ids, "attention_mask": mask}
    distance, runner = off(target, drafter, policy, prompts, end=1, real=True)
    assert distance < 1e-6 and max(runner.widths) > 1


@pytest.mark.parametrize("flags", [{"rank": 4, "markov": "gated"}, {"rank": 0}], ids=["gated", "DFlash"])
def test_deepspecs_form(tmp_path, flags):
    net = network(small.llama(layers=3), from_anchor=True, layers=2, **flags)
    weights = deepspec(tmp_path, net)
    loaded = hla.load_drafter(tmp_path)
    assert isinstance(loaded, DSparkDrafter)
    for name in ("target_layers", "block", "mask", "drafts", "rank", "markov"):
        assert getattr(loaded.network.config, name) == getattr(net.config, name), name
    found = loaded.state_dict()
    assert all(found[name].equal(tensor.double()) for name, tensor in weights.items() if "confidence" not in name)
    assert found.keys() - weights.keys() == {"d2t"} and not any("confidence" in name for name in found)


def test_zlabs_form_of_dflash_2(tmp_path):
    """Also of a target whose logits are scaled and capped, which moves the selector's scores."""
    target = hla.enable(small.llama(layers=3))
    net = network(target, layers=2, scale=0.2, cap=3.0, **SECOND)
    zlab(tmp_path, net)
    loaded, text = hla.load_drafter(tmp_path), torch.arange(9)
    assert isinstance(loaded, DFlash2Drafter) and vars(loaded.network.config) | {"layer": 0} == vars(net.config) | {
        "layer": 0, "sights": (AttentionWindow(),) * 2
    }  # fmt: skip
    assert draft_block(target, loaded.network, text) == draft_block(target, net, text)
    logits, hidden, before = torch.randn(2, small.VOCAB) * 10, torch.randn(2, 32), torch.tensor([3, 4])
    plain = network(target, layers=2, **SECOND)
    found, bent = (
        each.correct(given, hidden, before, ())[0]
        for each, given in ((net, logits), (plain, (logits / 15).tanh() * 3))
    )
    torch.testing.assert_close(found, bent)


@pytest.mark.parametrize("draft_vocabulary", [None, 40])
def test_what_is_saved_is_loaded(tmp_path, draft_vocabulary):
    net = network(small.llama(layers=3), rank=4, from_anchor=True, markov="rnn", draft_vocabulary=draft_vocabulary)
    hla.save_drafter(DSparkDrafter(net), tmp_path / "drafter", small.llama(layers=3))
    found = hla.load_drafter(tmp_path / "drafter")
    assert isinstance(found, DSparkDrafter) and found.network.config.drafts == 5
    weights = found.state_dict()
    assert weights.keys() == net.state_dict().keys()
    assert all(weights[name].equal(tensor) for name, tensor in net.state_dict().items())
    windowed = network(small.llama(layers=3), rank=4, sights=(AttentionWindow(3, moves=True),))
    with pytest.raises(ValueError, match="a DSpark drafter with windows is not written here"):
        hla.save_drafter(DSparkDrafter(windowed), tmp_path / "other")
