"""EAGLE drafts what its networks draft without caches, in every family of targets; from files of the `speculators` package, what that package gives
(README.md). Stops, filters and heads work beside it as beside a draft model.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import eagle, heads, small, tiny
from support.rule_cases import BOTH, GREEDY, SAMPLING
from support.sv_models import bins, steep
from support.tiny import NEVER_EMITTED
from transformers import DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.io import load_drafter
from hf_lossy_assist.drafters.networks.base import CAUSAL, AttentionWindow, HiddenStateModel
from hf_lossy_assist.models.facts import CACHE
from hf_lossy_assist.registry import list_entries


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


NETWORKS = {
    "plain": {}, "norm before the residual": {"norm_before_residual": True}, "norm before fc": {"norm_before_fc": True},
    "a norm for each": {"fc_norm": True}, "3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two layers": {"layers": 2}, "qwen3": {"kind": "qwen3"}, "whole vocabulary": {"draft_vocabulary": None}, "two states": {"target_layers": (2, 1)},
    "the target's embeddings": {"has_embeddings": False},
    "windows": {"layers": 2, "sights": (AttentionWindow(3, causal=True), CAUSAL)}, "a window of one": {"sights": (AttentionWindow(0, causal=True),)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("made", "inputs"),
    [
        pytest.param(
            made, (small.ragged(), small.one(), small.ragged((0, 0)))[n % 3], marks=[pytest.mark.full] * (n > 1)
        )
        for n, made in enumerate(NETWORKS.values())
    ],
    ids=NETWORKS,
)
def test_a_chain_is_that_of_the_network_without_caches(target, monkeypatch, made, inputs):
    """Also behind drafts of which some tokens were accepted: their places are the target's states'."""
    net = eagle.network(target, **made)
    drafter, seen = hla.Eagle3Drafter(net), eagle.watched(monkeypatch)
    policy = hla.LossyPolicy(hla.TopK(55), hla.Constant(4))
    settings = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    out = target.generate(**inputs, drafter=drafter, lossy_policy=policy, **settings)
    assert len({count for row in out.speculation.rows for _, count in row.steps}) > 2, "some rounds accept a part"
    drafted = 0
    for texts, draft, limits, _ in seen:
        for b, text in enumerate(texts[: len(draft.tokens)]):
            count = int(draft.lengths[b])
            if limits[b] and count:
                logits, tokens = eagle.chain(target, net, text, count)
                assert draft.tokens[b, :count].tolist() == tokens.tolist()
                best = logits.max(dim=-1).values
                torch.testing.assert_close(draft.validity[b, :count].double(), best, rtol=1e-5, atol=1e-5)
                drafted += count
    assert drafted > 12


@pytest.mark.parametrize("tail", [3, pytest.param(1, marks=pytest.mark.full)])
def test_turns_of_a_chat(target, monkeypatch, tail):
    """The second turn goes on from the cache of the first, of which the drafter has seen nothing: to it the text begins there."""
    drafter, inputs = eagle.trained(target, small.one(), rounds=15), small.one()
    settings = {"max_new_tokens": 10, "do_sample": False}
    texts, seen = [], eagle.watched(monkeypatch)
    for given in ({}, {"assistant_model": drafter, "lossy_policy": "strict"}):
        cache = DynamicCache(config=target.config)
        first = target.generate(**inputs, **{CACHE: cache}, **settings, **given)
        more = torch.cat([first, torch.tensor([[5, 6, 7][:tail]])], dim=1)
        seen.clear()
        texts.append(target.generate(more, attention_mask=torch.ones_like(more), **{CACHE: cache}, **settings, **given))  # fmt: skip
    assert texts[0].equal(texts[1])
    drafted = [(each.texts[0], each.draft, each.begins[0]) for each in seen if int(each.draft.lengths[0])]
    assert drafted and all(begin > 9 for *_, begin in drafted)
    for text, draft, begin in drafted:
        tokens = eagle.chain(target, drafter.network, text, int(draft.lengths[0]), begin)[1]
        assert draft.tokens[0, : len(tokens)].tolist() == tokens.tolist()


def test_many_texts_that_begin_alike(target):
    """A draft model reads a common beginning once; here each prompt is read, for its states."""
    shared = small.one(50)["input_ids"][0].tolist()
    prompts = [[*shared, 5, 6], [*shared, 7], [9, 10, 11]]
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected = [target.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]
    found = list(hla.generate_many(target, prompts, assistant_model=eagle.drafter(target), max_rows=2, **settings))
    assert [text.token_ids for text in sorted(found, key=lambda text: text.index)] == expected
    assert all(text.speculation.num_draft_tokens > 0 for text in found)


PROMPTS = (9, 1, 4, 14)


@cache
def trained_drafter():
    return eagle.trained(hla.enable(tiny.shared("llama")), tiny.prompts(PROMPTS), tiny.NEW, draft_vocabulary=70)


def write(policy, mode, **more):
    settings = {"eos_token_id": NEVER_EMITTED, "max_new_tokens": 12} | more
    if mode == SAMPLING:
        settings |= {"do_sample": True, "temperature": 1.5, "top_k": 0}
    drafts = trained_drafter()  # which draws random numbers where it is made
    torch.manual_seed(3)
    return tiny.assisted(tiny.shared("llama"), tiny.prompts(PROMPTS), drafts, policy, **settings)


@pytest.mark.full
def test_every_stop():
    """Each that can be made of its defaults, and one that holds others."""
    stops = [entry.make() for entry in list_entries("stop") if not entry.required]
    expected = write("strict", GREEDY).sequences
    for stop in (*stops, hla.AnyOf([hla.SVIP(), hla.Heuristic(3)])):
        assert write(stop, GREEDY).sequences.equal(expected), stop
        assert write(stop, SAMPLING).sequences.shape == expected.shape


@pytest.mark.parametrize("mode", BOTH)
def test_sv_with_a_companion(mode):
    """A draft model as the companion of an EAGLE-3 draft, as in SV's Figure 7."""
    target, companion = tiny.shared("llama"), tiny.draft_of(tiny.shared("llama"), "often")
    made = steep(target, trained_drafter(), companion, bins(np.random.default_rng(0)), batch=4)
    out = write(hla.SpeculativeVerification(made, companion, 4), mode)
    if mode == GREEDY:
        assert out.sequences.equal(write("strict", GREEDY).sequences)
    total = out.speculation.total()
    assert total.num_dropped_tokens > 0 and out.speculation.forwards["companion"] > 0
    other = steep(target, tiny.draft_of(target, "rarely"), companion, bins(np.random.default_rng(0)), batch=4)
    with pytest.raises(ValueError, match="was made for the draft") as error:
        write(hla.SpeculativeVerification(other, companion, 4), mode)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mode", BOTH)
def test_sprinter_with_a_head_on_the_drafters_states(mode):
    spec = heads.linear()
    assert write(hla.HeadStop(spec, 0.4, 4), GREEDY).sequences.equal(write("strict", GREEDY).sequences)
    total = write(hla.LossyPolicy(hla.AllButLast(), hla.HeadStop(spec, 0.4, 4)), mode).speculation.total()
    assert total.num_unchecked_tokens > 0


FOLDERS = sorted(path for path in Path(__file__).with_name("eagle3_golden").iterdir() if path.is_dir())


def opened(folder, rows):
    network = load_drafter(folder).network
    vocabulary = network.config.layer.vocab_size
    model = HiddenStateModel(network, network.embed_tokens, network.lm_head, rows, 64, vocabulary)
    return model, load_file(folder / "golden.safetensors")


def steps(model, ids, logits, places):
    """Three steps behind `places`, in which the tokens of the text are fed, draft the golden logits; others of the vocabulary are −inf."""
    for step in range(3):
        found = model.step(torch.stack([ids[place + step] for place in places])[:, None])
        for b, place in enumerate(places):
            expected = torch.full_like(found[b], -torch.inf)
            expected[model.network.target_ids] = logits[step, place]
            torch.testing.assert_close(found[b], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_chains_are_the_packages(folder):
    """Each row begins its chain at a place of its own; ids[i] is the token of pair i, so that a text has one before it."""
    places = [2, 6, 4]
    model, golden = opened(folder, len(places))
    hidden, ids = golden["hidden"], torch.cat([golden["ids"][0, :1], golden["ids"][0]])
    pad = torch.nn.utils.rnn.pad_sequence
    model.take(pad([hidden[0, : place + 1] for place in places], batch_first=True), [place + 1 for place in places])
    model.read(pad([ids[: place + 2] for place in places], batch_first=True))
    steps(model, ids[1:], golden["logits"], places)
    for drafts in (True, False):
        behind_a_partial_acceptance(folder, drafts)


def behind_a_partial_acceptance(folder, drafts):
    """One of three drafted tokens is accepted: the target's states take the place of the network's own, and the chain begins behind them.

    Also where nothing was drafted from the states that it had.
    """
    model, golden = opened(folder, 1)
    hidden, ids = golden["hidden"], torch.cat([golden["ids"][:, :1], golden["ids"]], dim=1)
    model.take(hidden[:, :4], [4])
    model.read(ids[:, :5])
    for place in (4, 5, 6) if drafts else ():
        model.step(ids[:, place : place + 1])
    # The target has read all of them, and what is behind the second is not the text's.
    model.take(hidden[:, 4:9], [6])
    model.read(ids[:, 4:7])
    assert model.known == model.learned == [6]
    steps(model, ids[0, 1:], golden["logits"], [5])
