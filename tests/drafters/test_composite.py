"""Suffixes beside a drafter on the target's states: the text and the distribution are the target's, and the network knows the tokens that suffixes drafted."""

from functools import cache

import pytest
import torch
from support import eagle, small, sv_models, tiny
from support.enumeration import off
from support.tiny import NEVER_EMITTED, some_eos

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.suffix import SuffixRun
from hf_lossy_assist.drafters.trained import DFlashDrafter


SUFFIX = hla.SuffixDrafter(min_match=1)
RAGGED = (9, 1, 4, 14)


@cache
def drafters(name):
    target = hla.enable(tiny.shared(name))
    return {
        "eagle": eagle.drafter(target, draft_vocabulary=None),
        "dflash": DFlashDrafter(eagle.dflash_network(target)),
    }


@pytest.mark.full(every=3)
@pytest.mark.nightly(every=9)
@pytest.mark.parametrize("policy", ["strict", hla.SVIP(h=0.6), hla.Fallback(hla.Constant(3), wait=2)], ids=str)
@pytest.mark.parametrize("kind", ["eagle", "dflash"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox"])
def test_greedy_is_generate(name, kind, policy):
    model, drafter = tiny.shared(name), drafters(name)[kind]
    whole = tiny.greedy(model, tiny.prompts(RAGGED), eos_token_id=NEVER_EMITTED)
    eos = some_eos(whole, max(RAGGED))  # rows leave one after the other
    both = hla.CompositeDrafter(SUFFIX, drafter)
    for end in (NEVER_EMITTED, eos):
        expected = tiny.greedy(model, tiny.prompts(RAGGED), eos_token_id=end)
        for given in ({"draft": None, "drafter": both}, {"draft": drafter, "drafter": "composite"}):
            out = tiny.assisted(model, tiny.prompts(RAGGED), policy=policy, eos_token_id=end, **given)
            assert out.sequences.equal(expected)
    assert out.speculation.num_draft_tokens > 0


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("inputs", [small.one(), small.ragged()], ids=["one", "ragged"])
def test_the_network_learns_the_tokens_of_suffixes(target, monkeypatch, inputs):
    """Each of its drafts is that of the network without caches, behind suffixes of which all, some and no tokens were accepted."""
    drafter, seen, searched = eagle.drafter(target), eagle.watched(monkeypatch), []
    look_up = SuffixRun._look_up

    def watched(self, *args):
        found = look_up(self, *args)
        searched.append(found[1])
        return found

    monkeypatch.setattr(SuffixRun, "_look_up", watched)
    policy = hla.LossyPolicy(hla.TopK(40), hla.Constant(4))
    both = hla.CompositeDrafter(SUFFIX, drafter)
    target.generate(**inputs, drafter=both, lossy_policy=policy, max_new_tokens=40, do_sample=False)
    found = list(eagle.drafts(seen))
    assert sum(map(bool, searched)) > 3 and len(found) >= 2
    for text, tokens in found:
        assert eagle.chain(target, drafter.network, text, len(tokens))[1].tolist() == tokens


def test_a_network_that_lags_far_behind_catches_up(target, monkeypatch):
    """Its states are not held for longer than 64 tokens, and what it drafts behind them is the same."""
    monkeypatch.setattr("hf_lossy_assist.drafters.hidden_state.FAR_BEHIND", 12)
    drafter, seen, inputs = eagle.drafter(target), eagle.watched(monkeypatch), small.one()
    wanted = target.generate(**inputs, max_new_tokens=60, do_sample=False)
    copied = hla.SuffixDrafter(min_match=8, max_draft=40)

    def look_up(self, text, limit, *_):
        return 8, wanted[0, len(text.tokens) :][:limit].tolist() if len(text.tokens) < 55 else []

    monkeypatch.setattr(SuffixRun, "_look_up", look_up)
    out = target.generate(
        **inputs,
        drafter=hla.CompositeDrafter(copied, drafter),
        lossy_policy="strict",
        max_new_tokens=60,
        do_sample=False,
    )
    found = list(eagle.drafts(seen))
    assert out.equal(wanted) and found
    for text, tokens in found:
        assert eagle.chain(target, drafter.network, text, len(tokens))[1].tolist() == tokens


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_beside_multi_token_prediction(tmp_path, layers):
    target = eagle.mtp_target(eagle.write_mtp(tmp_path, layers))
    inputs = {"input_ids": torch.tensor([[2, 3, 4, 2, 3]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    settings = {"max_new_tokens": 24, "do_sample": False}
    both = hla.CompositeDrafter(hla.SuffixDrafter(min_match=3), "mtp")
    out = target.generate(**inputs, drafter=both, lossy_policy="strict", return_dict_in_generate=True, **settings)
    assert out.sequences.equal(target.generate(**inputs, **settings))
    assert out.speculation.forwards["draft"] > 0


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_samples_have_the_targets_distribution(kind):
    """Enumerated: in one row a suffix is found, whose tokens are certain; in the other the network draws."""
    target = sv_models.models(3)[0]
    if kind == "eagle":
        drafter = eagle.drafter(target, draft_vocabulary=None, target_layers=(0, 1))
    else:
        drafter = DFlashDrafter(eagle.dflash_network(target, block=3, target_layers=(0, 1)))
    ids = torch.tensor([[0, 2, 2, 0, 2], [0, 0, 0, 2, 1]])
    prompts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompts["attention_mask"][-1, 0] = 0
    others = {"drafter": hla.CompositeDrafter(hla.SuffixDrafter(min_match=2), drafter)}
    distance, runner = off(
        target, None, hla.Constant(2), prompts, length=2, end=sv_models.END, real=True, others=others
    )
    assert distance < 2e-6 and max(runner.widths) == 2


def test_many_prompts(target):
    prompts = [small.one(n, seed=n)["input_ids"][0].tolist() for n in (7, 12, 9)]
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = [target.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]
    both = hla.CompositeDrafter(SUFFIX, eagle.drafter(target))
    found = list(hla.generate_many(target, prompts, drafter=both, max_rows=2, **settings))
    assert [text.token_ids for text in sorted(found, key=lambda text: text.index)] == expected


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_a_lossy_rule_keeps_no_token_of_a_suffix_that_a_processor_forbids(target):
    inputs = small.ragged()
    inputs["input_ids"][:, -5:] = torch.tensor([5, 6, 7, 5, 6])
    settings = {"max_new_tokens": 12, "lossy_policy": hla.TopK(96), "do_sample": False}
    settings["drafter"] = hla.CompositeDrafter(hla.SuffixDrafter(), eagle.drafter(target))
    assert (target.generate(**inputs, **settings) == 7)[:, 9:].any()
    assert not (target.generate(**inputs, **settings, bad_words_ids=[[7]]) == 7)[:, 9:].any()


@pytest.mark.parametrize(
    ("drafter", "says"),
    [("suffix", "two drafters"), (hla.CompositeDrafter(hla.SuffixDrafter(), "mtp"), "two drafters")],
    ids=["suffix", "two already"],
)
def test_two_drafters_are_refused_unless_one_drafts_with_another(target, drafter, says):
    with pytest.raises(ValueError, match=rf"^[^\n]*{says}[^\n]*composite[^\n]*$"):
        target.generate(**small.one(), assistant_model=eagle.drafter(target), drafter=drafter, lossy_policy="strict")
    with pytest.raises(ValueError, match=r"^CompositeDrafter: expected first without a model[^\n]*$"):
        hla.CompositeDrafter(eagle.drafter(target), "mtp")
