"""EAGLE-3 drafters for targets of several families, and when sampling: the text is the target's own, whatever is drafted."""

from functools import cache

import pytest
import torch
from support import eagle, small, tiny
from support.distributions import REJECT, goodness, pair, sample, target_law
from support.end_tokens import some_eos
from support.tiny import NEVER_EMITTED
from transformers import DynamicCache, TemperatureLogitsWarper, TopPLogitsWarper

import hf_lossy_assist as hla
from hf_lossy_assist.models.compat import CACHE


RAGGED = (9, 1, 4, 14)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_neox")


@cache
def drafter_for(name, kind):
    model = hla.enable(tiny.shared(name))
    if kind == "random":
        return eagle.drafter(model)
    return eagle.trained(model, tiny.prompts(RAGGED), tiny.NEW, kept=70)


@pytest.mark.full
@pytest.mark.nightly(every=3)
@pytest.mark.parametrize("kind", ["random", "trained"])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_generate(name, kind):
    model, drafter, width = tiny.shared(name), drafter_for(name, kind), max(RAGGED)
    whole = tiny.greedy(model, tiny.prompts(RAGGED), eos_token_id=NEVER_EMITTED)
    eos = some_eos(whole, width)  # rows leave one after the other
    ended = tiny.greedy(model, tiny.prompts(RAGGED), eos_token_id=eos)
    assert len({int((row != tiny.PAD).sum()) for row in ended[:, width:]}) > 1
    rates = []
    for policy in ("strict", {"stop": {"name": "constant", "gamma": 2}}, hla.SVIP(h=0.6)):
        for expected, end in ((whole, NEVER_EMITTED), (ended, eos)):
            out = tiny.assisted(model, tiny.prompts(RAGGED), drafter, policy, eos_token_id=end)
            assert out.sequences.equal(expected)
            rates.append(out.speculation.draft_acceptance_rate)
    assert 0 < max(rates) < 1 or kind == "random"
    for length in (1, 9):
        expected = tiny.greedy(model, tiny.prompts((length,)), eos_token_id=NEVER_EMITTED)
        out = tiny.assisted(model, tiny.prompts((length,)), drafter, "strict", eos_token_id=NEVER_EMITTED)
        assert out.sequences.equal(expected)


@cache
def sampling_drafter(kept):
    target, _ = pair()
    return eagle.drafter(target, kept=kept, target_layers=(0, 1, 2))


@pytest.mark.full
@pytest.mark.nightly(every=3)
@pytest.mark.parametrize("stop", [hla.Constant(2), hla.SVIP(h=0.45)], ids=str)
@pytest.mark.parametrize(("settings", "warpers"), [({"temperature": 0.7}, (TemperatureLogitsWarper(0.7),)), ({"top_p": 0.8}, (TopPLogitsWarper(0.8),))], ids=["temperature", "top_p"])  # fmt: skip
@pytest.mark.parametrize("kept", [None, 3], ids=["whole", "reduced"])
def test_samples_have_the_targets_law(kept, settings, warpers, stop):
    """Of six tokens the reduced drafter can propose three."""
    counts = sample(hla.LossyPolicy(hla.Strict(), stop), settings | {"assistant_model": sampling_drafter(kept)}, 3)
    assert goodness(counts, target_law(warpers)) > REJECT


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_that_law_can_be_missed():
    policy = hla.LossyPolicy(hla.TopK(3), hla.Constant(2))
    counts = sample(policy, {"assistant_model": sampling_drafter(3), "temperature": 0.7}, 3)
    assert goodness(counts, target_law((TemperatureLogitsWarper(0.7),))) < REJECT


def test_statistics_stop_strings_and_streams():
    model = hla.enable(small.llama(layers=3))
    drafter, inputs = eagle.trained(model, small.ragged(), rounds=40), small.ragged()
    settings = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    out = model.generate(**inputs, assistant_model=drafter, lossy_policy="strict", return_dict_in_generate=True, **settings)  # fmt: skip
    assert out.sequences.equal(expected)
    report = out.speculation
    assert [row.num_new_tokens for row in report.rows] == [20, 20, 20]
    for row in report.rows:
        assert all(accepted <= drafted for drafted, accepted in row.steps)
    assert 0 < report.draft_acceptance_rate <= 1 and report.forwards["target"] < 20
    tokenizer = small.tokenizer()
    word = tokenizer.decode(expected[0, -8])
    stopped = settings | {"stop_strings": [word], "tokenizer": tokenizer}
    assert model.generate(**inputs, assistant_model=drafter, lossy_policy="strict", **stopped).equal(model.generate(**inputs, **stopped))  # fmt: skip


@pytest.mark.parametrize("tail", [1, 3])
def test_turns_of_a_chat(monkeypatch, tail):
    """The second turn goes on from the cache of the first, of which the drafter has seen nothing: to it the text begins there."""
    model = hla.enable(small.llama(layers=3))
    drafter, inputs = eagle.trained(model, small.one(), rounds=40), small.one()
    settings = {"max_new_tokens": 10, "do_sample": False}
    texts, seen = [], eagle.watched(monkeypatch)
    for given in ({}, {"assistant_model": drafter, "lossy_policy": "strict"}):
        cache = DynamicCache(config=model.config)
        first = model.generate(**inputs, **{CACHE: cache}, **settings, **given)
        more = torch.cat([first, torch.tensor([[5, 6, 7][:tail]])], dim=1)
        seen.clear()
        texts.append(model.generate(more, attention_mask=torch.ones_like(more), **{CACHE: cache}, **settings, **given))  # fmt: skip
    assert texts[0].equal(texts[1])
    drafted = [(its.texts[0], its.draft, its.begins[0]) for its in seen if int(its.draft.lengths[0])]
    assert drafted and all(begin > 9 for *_, begin in drafted)
    for text, draft, begin in drafted:
        tokens = eagle.chain(model, drafter.network, text, int(draft.lengths[0]), begin)[1]
        assert draft.tokens[0, : len(tokens)].tolist() == tokens.tolist()


def test_many_texts():
    """What prompts begin with is read once by a draft model; here each is read, for its states."""
    model = hla.enable(small.llama(layers=3))
    shared = small.one(50)["input_ids"][0].tolist()
    prompts = [[*shared, 5, 6], [*shared, 7], [9, 10, 11]]
    drafter = eagle.drafter(model)
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected = [model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]
    found = list(hla.generate_many(model, prompts, assistant_model=drafter, max_rows=2, **settings))
    assert [its.token_ids for its in sorted(found, key=lambda its: its.index)] == expected
    assert all(its.speculation.num_draft_tokens > 0 for its in found)
