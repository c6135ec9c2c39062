"""P-EAGLE drafters: one forward drafts what `speculators` works out (made by peagle_golden/make.py), and the text is the target's whatever they draft."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import eagle, small, tiny
from support.drafter_files import plain, reweighted
from support.eagle import drafts, watched
from support.enumeration import off
from support.heads import linear
from support.tiny import NEVER_EMITTED, some_eos

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.networks.sight import Sight
from hf_lossy_assist.drafters.parallel_eagle import ParallelEagleDrafter, ParallelEagleModel


GOLDEN = Path(__file__).with_name("peagle_golden")
FOLDERS = sorted(path for path in GOLDEN.iterdir() if path.is_dir() and not path.name.startswith("_"))
RAGGED = (9, 1, 4, 14)


def made(target, **flags):
    return ParallelEagleDrafter(eagle.network(target, **{"drafts": 4, "mask": 3} | flags))


@torch.no_grad()
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_drafts_are_the_packages(folder):
    """Behind each place of a text, beside rows of other lengths, and behind a partial acceptance."""
    drafter, golden = hla.load_drafter(folder), load_file(folder / "golden.safetensors")
    net, ids, hidden = drafter.network, golden["ids"][0], golden["hidden"][0]
    keys = zip(golden["anchor"].tolist(), golden["depth"].tolist(), strict=True)
    expected = dict(zip(keys, golden["logits"], strict=True))
    assert isinstance(drafter, ParallelEagleDrafter) and net.config.drafts == 4
    model, seen = ParallelEagleModel(net, net.embed_tokens, net.lm_head, 3, 64, net.config.layer.vocab_size), 0
    model.wanted = 4
    pad = torch.nn.utils.rnn.pad_sequence
    for places in ([2, 5, 4], [3, 6, 6]):  # pairs of each row
        known = model.known
        model.learn(pad([hidden[a : b + 1] for a, b in zip(known, places, strict=True)], batch_first=True), [place + 1 for place in places])  # fmt: skip
        fed = [ids[length - 1 : place + 1] for length, place in zip(model.lengths, places, strict=True)]
        tokens, counts = pad(fed, batch_first=True), list(map(len, fed))
        for depth in range(4):
            found = model.feed(tokens, counts, keep=1)[:, 0, net.target_ids]
            for row, place in enumerate(places):
                if (place, depth) in expected:
                    torch.testing.assert_close(found[row], expected[place, depth], rtol=1e-5, atol=1e-5)
                    seen += 1
            tokens, counts = torch.zeros(3, 1, dtype=torch.long), [1] * 3  # whatever was drafted
        model.rollback([place + 2 for place in places])
    assert seen >= 20


@torch.no_grad()
def parallel_draft(target, net, text, gamma, begin=0):
    """The greedy draft of `gamma` tokens behind `text` (n,), and what the head reads (γ, H), in one forward without a cache."""
    found = target(text[None, :-1], output_hidden_states=True).hidden_states
    states = net.fuse(torch.cat([found[layer] for layer in net.config.target_layers], dim=-1))[:, begin:]
    states = torch.cat([states, net.masked_state().expand(1, gamma - 1, -1)], dim=1)
    tokens = torch.tensor([[*text[begin + 1 :].tolist(), *[net.config.mask] * (gamma - 1)]])
    count, known = tokens.shape[1], len(text) - 2 - begin
    places = torch.arange(count)
    masks = []
    for sight in net.sights:
        seen = places[None] <= places[:, None]
        if sight.reach is not None:
            first = places[:, None] - sight.reach
            seen &= (places[None] >= first) | (places[None] >= places.clamp(max=known)[:, None])
        masks.append(
            torch.zeros(count, count, dtype=states.dtype).masked_fill(~seen, torch.finfo(states.dtype).min)[None, None]
        )
    embedding = net.embed_tokens or target.get_input_embeddings()
    read = net(embedding(tokens), states, places[None], masks, None)[1][0, -gamma:]
    logits = net.lm_head(read)
    return net.target_ids[logits.argmax(dim=-1)].tolist(), read


SETTINGS = {
    "plain": {},
    "two layers, the whole vocabulary": {"layers": 2, "draft_vocabulary": None, "norm_output": True},
    "windows": {"layers": 2, "sights": (Sight(2, moves=True, causal=True), Sight(causal=True))},
    "the target's embeddings": {"has_embeddings": False, "kind": "qwen3"},
}


@pytest.mark.full(every=2)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("inputs", [small.one(), small.ragged()], ids=["one", "ragged"])
@pytest.mark.parametrize("flags", SETTINGS.values(), ids=SETTINGS)
def test_what_is_drafted_is_the_networks(monkeypatch, flags, inputs):
    """In each round, whatever was accepted before; no more tokens than it was trained to draft, in one forward."""
    target = hla.enable(small.llama(layers=3))
    drafter, seen, forwards = made(target, **flags), watched(monkeypatch), []
    run = ParallelEagleModel._run
    monkeypatch.setattr(ParallelEagleModel, "_run", lambda *given: (forwards.append(1), run(*given))[1])
    policy = hla.LossyPolicy(hla.TopK(55), hla.Constant(9))
    out = target.generate(**inputs, assistant_model=drafter, lossy_policy=policy, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)  # fmt: skip
    assert len({accepted for row in out.speculation.rows for _, accepted in row.steps}) > 1, (
        "some rounds accept a part"
    )
    drafted = 0
    for text, tokens in drafts(seen):
        assert len(tokens) <= 4
        assert tokens == parallel_draft(target, drafter.network, text, 4)[0][: len(tokens)]
        drafted += len(tokens)
    assert drafted > 12
    assert len(forwards) <= len(seen) + 1, "one a round, and the prompts'"


@pytest.mark.full(every=3)
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gemma3", "phi", "gpt2", "gpt_neox"])
def test_greedy_is_generate(name):
    model = tiny.shared(name)
    drafter = made(hla.enable(model))
    whole = tiny.greedy(model, tiny.prompts(RAGGED), eos_token_id=NEVER_EMITTED)
    for end in (NEVER_EMITTED, some_eos(whole, max(RAGGED))):
        expected = tiny.greedy(model, tiny.prompts(RAGGED), eos_token_id=end)
        for policy in ("strict", {"stop": {"name": "constant", "gamma": 2}}, hla.SVIP(h=0.9)):
            assert tiny.assisted(model, tiny.prompts(RAGGED), drafter, policy, eos_token_id=end).sequences.equal(
                expected
            )


@pytest.mark.parametrize(
    "stop", [hla.Constant(2), pytest.param(hla.SVIP(h=0.9, max_draft=2), marks=pytest.mark.full)], ids=["two", "svip"]
)
def test_the_law_of_texts(stop):
    """Exactly, of two rows together, with an end token."""
    target = hla.enable(small.llama(vocab=4).float())
    drafter = made(target, draft_vocabulary=3, drafts=2)
    prompts = {"input_ids": torch.tensor([[0, 3, 2], [3, 2, 3]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}  # fmt: skip
    distance, runner = off(target, drafter, hla.LossyPolicy(hla.Strict(), stop), prompts, end=1, real=True)
    assert distance < 1e-6 and max(runner.widths) > 1


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_heads_read_its_states(monkeypatch):
    """Those that predict a token; those of a token are not there."""
    target = hla.enable(small.llama(layers=3))
    drafter, seen, read = made(target), watched(monkeypatch), 0
    head = linear(hla.HeadConfig(32, polarity="important", method="autojudge"))
    policy = hla.LossyPolicy(hla.Judge(head, 0.5), hla.Constant(3))
    target.generate(**small.ragged(), assistant_model=drafter, lossy_policy=policy, max_new_tokens=12, do_sample=False)
    for round_ in seen:
        for row, (text, count) in enumerate(zip(round_.texts, round_.draft.lengths.tolist(), strict=True)):
            if count:
                states = parallel_draft(target, drafter.network, text, 4)[1][:count]
                torch.testing.assert_close(round_.draft.hidden[row, :count], states)
                read += count
    assert read > 12
    head = linear(
        hla.HeadConfig(32, features=hla.FeatureSpec(position="token"), polarity="important", method="autojudge")
    )
    with pytest.raises(ValueError, match="P-EAGLE drafter has none of it: a block is filled in before its tokens"):
        target.generate(**small.one(), assistant_model=drafter, lossy_policy=hla.Judge(head, 0.5), max_new_tokens=4)


def test_rows_that_join():
    target = hla.enable(small.llama(layers=3))
    prompts = [list(range(3, 3 + length)) for length in (9, 2, 5, 14, 3)]
    expected = [
        target.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    found = hla.generate_many(
        target, prompts, assistant_model=made(target), lossy_policy="strict", max_rows=2, max_new_tokens=9
    )
    assert [result.token_ids for result in sorted(found, key=lambda result: result.index)] == expected


def test_the_plain_form(tmp_path):
    """As AWS and NeMo write it for vLLM: beside EAGLE-3's entries the mask token, and a learned state of two dimensions."""
    target = hla.enable(small.llama(layers=3))
    net = eagle.network(target, drafts=8, mask=3)
    folder = tmp_path / "its"
    same = eagle.network(target)
    same.load_state_dict({name: tensor for name, tensor in net.state_dict().items() if name != "mask_hidden"})
    hla.save_drafter(hla.Eagle3Drafter(same), folder, target)
    plain(folder, ptd_token_id=3)
    reweighted(folder, lambda found: found.update(mask_hidden=net.mask_hidden.detach().view(1, -1).clone()))
    loaded = hla.load_drafter(folder)
    assert (
        isinstance(loaded, ParallelEagleDrafter)
        and vars(loaded.network.config).items() >= {"mask": 3, "drafts": 8}.items()
    )
    text = torch.arange(9)
    assert parallel_draft(target, loaded.network, text, 8)[0] == parallel_draft(target, net, text, 8)[0]
    with pytest.raises(TypeError, match="expected an EAGLE-3 or DSpark drafter, got one of ParallelEagleConfig"):
        hla.save_drafter(loaded, tmp_path / "other")


def test_another_targets_mask():
    target = hla.enable(small.llama(layers=3))
    with pytest.raises(
        ValueError, match="mask token 97, and there are embeddings of 97 tokens: it is another target's"
    ):
        target.generate(**small.one(), assistant_model=made(target, mask=97), lossy_policy="strict", max_new_tokens=4)
