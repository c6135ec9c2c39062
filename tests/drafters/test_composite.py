"""Suffixes beside a drafter on the target's states: the text and the distribution are the target's, and the network knows the tokens that suffixes drafted."""

import pytest
import torch
from support import eagle, small, sv_models
from support.enumeration import off

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.suffix import SuffixRun
from hf_lossy_assist.drafters.trained import DFlashDrafter


SUFFIX = hla.SuffixDrafter(min_match=1)


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_the_network_learns_the_tokens_of_suffixes(target, monkeypatch):
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
    target.generate(**small.ragged(), drafter=both, lossy_policy=policy, max_new_tokens=40, do_sample=False)
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
    both = hla.CompositeDrafter(copied, drafter)
    out = target.generate(**inputs, drafter=both, lossy_policy="strict", max_new_tokens=60, do_sample=False)
    found = list(eagle.drafts(seen))
    assert out.equal(wanted) and found
    for text, tokens in found:
        assert eagle.chain(target, drafter.network, text, len(tokens))[1].tolist() == tokens


def test_beside_multi_token_prediction(tmp_path):
    target = eagle.mtp_target(eagle.write_mtp(tmp_path, 1))
    inputs = {"input_ids": torch.tensor([[2, 3, 4, 2, 3]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    settings = {"max_new_tokens": 24, "do_sample": False}
    both = hla.CompositeDrafter(hla.SuffixDrafter(min_match=3), "mtp")
    out = target.generate(**inputs, drafter=both, lossy_policy="strict", return_dict_in_generate=True, **settings)
    assert out.sequences.equal(target.generate(**inputs, **settings))
    assert out.speculation.forwards["draft"] > 0


@pytest.mark.parametrize("kind", ["eagle", "eagle of two tokens", "dflash"])
def test_samples_have_the_targets_distribution(kind):
    """Enumerated: in one row a suffix is found, whose tokens are certain; in the other the network draws."""
    target = sv_models.models(3)[0]
    if kind != "dflash":
        drafter = eagle.drafter(target, draft_vocabulary=2 if "two" in kind else None, target_layers=(0, 1))
    else:
        drafter = DFlashDrafter(eagle.dflash_network(target, block=3, target_layers=(0, 1)))
    ids = torch.tensor([[0, 2, 2, 0, 2], [0, 0, 0, 2, 1]])
    prompts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompts["attention_mask"][-1, 0] = 0
    others = {"drafter": hla.CompositeDrafter(hla.SuffixDrafter(min_match=2), drafter)}
    how = {"length": 2, "end": sv_models.END, "real": True, "others": others}
    distance, runner = off(target, None, hla.Constant(2), prompts, **how)
    assert distance < 2e-6 and max(runner.widths) == 2


def test_two_drafters_are_refused_unless_one_drafts_with_another(target):
    for drafter in ("suffix", hla.CompositeDrafter(hla.SuffixDrafter(), "mtp")):
        with pytest.raises(ValueError, match=r"^[^\n]*two drafters[^\n]*composite[^\n]*$"):
            given = {"assistant_model": eagle.drafter(target), "drafter": drafter, "lossy_policy": "strict"}
            target.generate(**small.one(), **given)
    with pytest.raises(ValueError, match=r"^CompositeDrafter: expected first without a model[^\n]*$"):
        hla.CompositeDrafter(eagle.drafter(target), "mtp")
