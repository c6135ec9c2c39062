"""Transformers' generators on the target's hidden states: they draft here what they draft in Transformers' own loop, and change no text."""

import pytest
import torch
from support import eagle, small
from support.distributions import NEW, PROMPT, REJECT, SIZE, goodness, pair, target_law
from support.paper_rules import Ensemble
from transformers import DynamicCache, TemperatureLogitsWarper
from transformers.generation import candidate_generator as stock

import hf_lossy_assist as hla
from hf_lossy_assist.generation.draft_settings import STATE_DRAFTS
from hf_lossy_assist.models.facts import CACHE


pytestmark = pytest.mark.skipif(not STATE_DRAFTS, reason="this Transformers has no MTP")


@pytest.fixture(scope="module")
def mtp(tmp_path_factory):
    """A target with so many MTP layers."""
    made = {}

    def target(layers):
        if layers not in made:
            made[layers] = eagle.mtp_target(eagle.write_mtp(tmp_path_factory.mktemp("mtp"), layers))
        return made[layers]

    return target


@pytest.fixture(scope="module")
def target(mtp):
    return mtp(3)


MTP = {"use_mtp": True, "lossy_policy": "strict"}


def drafted(monkeypatch):
    """Text and draft of each call of Transformers' generator from now on."""
    seen, original = [], stock.MTPCandidateGenerator.get_candidates

    def get(self, input_ids, *args, **kwargs):
        found, logits = original(self, input_ids, *args, **kwargs)
        if found.shape[1] > input_ids.shape[1]:
            seen.append((input_ids[0].tolist(), found[0, input_ids.shape[1] :].tolist()))
        return found, logits

    monkeypatch.setattr(stock.MTPCandidateGenerator, "get_candidates", get)
    return seen


def prompt(seed, length=7):
    return torch.randint(2, SIZE, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.full
@pytest.mark.parametrize("layers", [1, 3])
def test_drafts_are_those_of_transformers_loop(mtp, layers, monkeypatch):
    target = mtp(layers)
    seen, accepted = drafted(monkeypatch), []
    settings = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    for seed in range(2):
        ids = prompt(seed)
        plain = target.generate(ids, **settings).sequences
        seen.clear()
        target.generate(ids, use_mtp=True, **settings)
        expected = list(seen)
        seen.clear()
        out = target.generate(ids, use_mtp=True, lossy_policy=hla.Constant(8), **settings)
        assert out.sequences.equal(plain)
        last = len(seen[-1][0])  # Transformers drafts for places behind the end, too
        assert seen == [entry for entry in expected if len(entry[0]) <= last] and len(seen) > 4
        accepted += [count for _, count in out.speculation.rows[0].steps]
    assert len(set(accepted)) > 1, "some rounds accept a token, and some do not"


def test_a_target_cast_after_loading(tmp_path):
    """Its config still says float32, and so does what Transformers reads of its MTP layers by it."""
    target = eagle.mtp_target(eagle.write_mtp(tmp_path, 2)).bfloat16()
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    out = target.generate(prompt(4), **MTP, **settings)
    assert out.sequences.equal(target.generate(prompt(4), **settings).sequences)
    assert out.speculation.num_draft_tokens > 0


def test_short_prompts(target):
    """The prompt has fewer tokens than there are MTP layers, with which Transformers' own loop ends in an error: it drafts when there are enough."""
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    for length in (1, 2, 3):
        out = target.generate(prompt(4, length), **MTP, **settings)
        assert out.sequences.equal(target.generate(prompt(4, length), **settings).sequences)
        assert out.speculation.num_draft_tokens > 0


def test_turns_of_a_chat(target):
    texts = []
    for more in ({}, MTP):
        cache = DynamicCache(config=target.config)
        settings = {CACHE: cache, "max_new_tokens": 9, "do_sample": False} | more
        first = target.generate(prompt(1), **settings)
        texts.append(target.generate(torch.cat([first, prompt(2, 3)], dim=1), **settings))
    assert texts[0].equal(texts[1])


@pytest.mark.nightly
def test_samples_have_the_targets_distribution(target):
    settings = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.7, "top_k": 0, "eos_token_id": None}
    counts = torch.zeros(SIZE**NEW)
    generator = torch.Generator().manual_seed(1)
    for _ in range(700):
        text = target.generate(PROMPT, **MTP, **settings, generator=generator)[0, -NEW:]
        counts[int(text @ torch.tensor([SIZE**2, SIZE, 1]))] += 1
    assert goodness(counts, target_law((TemperatureLogitsWarper(0.7),), target)) > REJECT


@pytest.mark.full
def test_a_generator_decides_the_draft_too(target):
    for several in (False, True):
        texts = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            generator = torch.Generator().manual_seed(7)
            settings = {"max_new_tokens": 20, "do_sample": True, "generator": [generator] if several else generator}
            texts.append(target.generate(prompt(3), **MTP, **settings))
        assert texts[0].equal(texts[1])


def refused(target, error, match, ids=None, **given):
    settings = {"lossy_policy": "strict", "max_new_tokens": 4} | given
    with pytest.raises(error, match=rf"^[^\n]*{match}[^\n]*$"):
        target.generate(prompt(1) if ids is None else ids, **settings)


def test_what_does_not_go_together_is_refused(target):
    for more, match in (
        ({"ids": torch.tensor([[3, 4], [4, 5]])}, "drafts for one row at a time; this batch has 2"),
        ({"lossy_policy": "svip"}, "SVIP reads what a draft model computes"),
        ({"lossy_policy": Ensemble(0.5)}, "compares the target's distribution with the draft's"),
        ({"prompt_lookup_num_tokens": 3}, "are two ways to draft: pass one of them"),
        ({"assistant_model": pair()[1]}, "are two ways to draft"),
    ):
        refused(target, ValueError, match, use_mtp=True, **more)
    draft, plain = small.llama(layers=1), hla.enable(small.llama(layers=3))
    refused(plain, ValueError, "has no multi-token prediction layers", use_mtp=True)
    in_transformers = "'dflash' drafts in Transformers' own loop: leave lossy_policy out, or load the drafter's files"
    refused(plain, ValueError, in_transformers, assistant_model=draft, speculation_type="dflash")
    with pytest.raises(ValueError, match=r"^[^\n]*use_mtp and assistant_model are two ways to draft[^\n]*$"):
        plain.generate(prompt(1), use_mtp=True, max_new_tokens=4, custom_generate=hla.Runner("strict", draft))


UNREAD = "MTP layers of .* cannot be read .* pass assistant_model=… in place of MTP"


def test_a_checkpoint_that_is_damaged_or_has_no_layers(tmp_path):
    target = eagle.mtp_target(eagle.write_mtp(tmp_path, 1))
    with_other_names = eagle.mtp_target(tmp_path)
    with_other_names._keys_to_ignore_on_load_unexpected = [r"model\.layers\.9.*"]
    refused(with_other_names, ValueError, UNREAD, use_mtp=True)
    (tmp_path / "model.safetensors").unlink()  # not overwritten: the target's weights are mapped from it
    (tmp_path / "model.safetensors").write_bytes(b"xx")
    refused(target, ValueError, UNREAD, use_mtp=True)
    target.config.num_mtp_layers = 0
    refused(target, ValueError, "has no multi-token prediction layers", use_mtp=True)


def test_a_models_config_is_honoured(mtp, monkeypatch):
    """Counts where the call names nothing to draft with, and never takes an assistant's place."""
    target, draft = mtp(1), pair()[1]
    settings = {"max_new_tokens": 8, "do_sample": False, "lossy_policy": "strict", "return_dict_in_generate": True}
    expected = target.generate(prompt(1), max_new_tokens=8, do_sample=False)
    monkeypatch.setattr(target.generation_config, "use_mtp", True)
    alone = target.generate(prompt(1), **settings)
    assert alone.sequences.equal(expected) and alone.speculation.num_draft_tokens > 0
    beside = target.generate(prompt(1), assistant_model=draft, **settings)
    assert beside.sequences.equal(expected) and beside.speculation.forwards["draft"] > 8
    assert target.generation_config.use_mtp is True
    with pytest.raises(ValueError, match="lossy_policy needs something to draft with"):
        target.generate(prompt(1), use_mtp=False, **settings)


def test_by_name_and_read_once(mtp, monkeypatch):
    from transformers.modeling_layers import MtpModel

    target, reads = mtp(2), []
    settings = {"max_new_tokens": 8, "do_sample": False, "lossy_policy": "strict"}
    expected = target.generate(prompt(1), use_mtp=True, **settings)
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *args, **kwargs: reads.append(args))
    assert target.generate(prompt(1), drafter="mtp", **settings).equal(expected)
    assert target.generate(prompt(1), drafter=hla.MTPDrafter(), **settings).equal(expected) and not reads
