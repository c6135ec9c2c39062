"""Scores, filters, seeds, outputs and dtypes of `generate` are with a policy what they are without."""

import copy

import pytest
import torch
from support.small import PAD, VOCAB, llama, near, one, ragged
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import GenerateDecoderOnlyOutput, logits_process

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


PROMPTS = {"one": one(), "ragged": ragged()}
NEW = 24


@pytest.fixture(scope="module")
def target():
    return hla.enable(llama())


@pytest.fixture(scope="module")
def draft(target):
    return near(hla.disable(copy.deepcopy(target)))


def greedy(target, draft, prompts, policy="strict", **settings):
    """(Transformers' own output, this package's) of one greedy call, both as dicts."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True} | settings
    ours = {"assistant_model": draft, "lossy_policy": policy}
    return target.generate(**prompts, **settings), target.generate(**prompts, **settings, **ours)


class Parity(LogitsProcessor):
    """Favours even tokens after an odd sum of the text, and odd ones after an even sum: it needs each token's own prefix."""

    def __call__(self, input_ids, scores):
        wanted = (input_ids.sum(dim=1, keepdim=True) + 1) % 2
        even = torch.arange(scores.shape[1], device=scores.device) % 2 == 0
        return scores + 5.0 * (even == (wanted == 0))


GREEDY = {
    "plain": {},
    "min_new_tokens": {"min_new_tokens": 18, "eos_token_id": [20, 36, 84], "pad_token_id": PAD},
    "two processors": {"logits_processor": LogitsProcessorList([Parity()]), "repetition_penalty": 1.3},
}  # fmt: skip


@pytest.mark.parametrize("shape", PROMPTS)
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_text_and_scores_are_those_of_transformers(target, draft, name, shape):
    wants = {"output_scores": True, "output_logits": True}
    expected, ours = greedy(target, draft, PROMPTS[shape], policy="svip", **GREEDY[name], **wants)
    assert torch.equal(expected.sequences, ours.sequences)
    width = PROMPTS[shape]["input_ids"].shape[1]
    ends = [len(row.token_sources) for row in ours.speculation.rows]
    assert len(ours.scores) == len(ours.logits) == max(ends) == ours.sequences.shape[1] - width
    for row, end in enumerate(ends):
        for kind in ("scores", "logits"):
            found, wanted = (torch.stack(getattr(o, kind)[:end])[:, row] for o in (ours, expected))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    if name == "two processors":  # they did something
        assert not torch.equal(greedy(target, draft, PROMPTS[shape])[0].sequences, expected.sequences)


WARPERS = (
    ("temperature", 0.6, logits_process.TemperatureLogitsWarper), ("top_k", 5, logits_process.TopKLogitsWarper),
    ("top_p", 0.7, logits_process.TopPLogitsWarper), ("min_p", 0.2, logits_process.MinPLogitsWarper),
    ("typical_p", 0.6, logits_process.TypicalLogitsWarper),
)  # fmt: skip


@pytest.mark.parametrize("shape", PROMPTS)
def test_sampling_filters_are_applied_once_at_every_position(target, shape):
    """The scores are those of the finished text, read in one go and warped once; each token lies inside its filter."""
    prompts, draft = PROMPTS[shape], near(target, 0.6)  # q and p differ enough for rejections
    width = prompts["input_ids"].shape[1]
    for setting, value, warper in WARPERS:
        torch.manual_seed(3)
        out = target.generate(
            **prompts, **({"top_k": 0} | {setting: value}), max_new_tokens=NEW, do_sample=True, assistant_model=draft,
            lossy_policy="strict", return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        mask = torch.cat([prompts["attention_mask"], torch.ones(len(out.sequences), NEW, dtype=torch.long)], dim=1)
        with torch.no_grad():
            raw = target(out.sequences, attention_mask=mask, position_ids=mask.cumsum(1).sub(1).clamp(min=0)).logits
        expected = warper(value)(None, raw[:, width - 1 : -1].reshape(-1, VOCAB)).view(-1, NEW, VOCAB)
        got = torch.stack(out.scores, dim=1)
        torch.testing.assert_close(got.double(), expected, atol=1e-3, rtol=0)
        assert got.gather(-1, out.sequences[:, width:, None]).isfinite().all(), setting
        assert 0 < out.speculation.draft_acceptance_rate < 1


def test_a_seed_decides_what_is_sampled(target, draft):
    def sample(seed):
        torch.manual_seed(seed)
        return target.generate(**ragged(), max_new_tokens=NEW, do_sample=True, assistant_model=draft, lossy_policy="svip")  # fmt: skip

    assert torch.equal(sample(5), sample(5))
    assert not torch.equal(sample(5), sample(6))


def test_the_output_is_transformers_class_with_one_field_more(target, draft):
    expected, ours = greedy(target, draft, PROMPTS["ragged"], output_scores=True)
    assert isinstance(ours, GenerateDecoderOnlyOutput) and isinstance(ours.speculation, hla.SpeculationStats)
    assert set(ours) - set(expected) == {"speculation"}
    assert set(expected) - set(ours) <= {CACHE}  # rows of a batch need not end at one place
    assert len(ours.speculation.rows) == 3 and ours.speculation.num_new_tokens == 3 * NEW


@pytest.mark.full
def test_target_and_draft_may_have_different_dtypes(target, draft):
    pairs = (("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float32"), ("float32", "float64"))
    for dtypes in pairs:
        cast, cast_draft = (copy.deepcopy(m).to(getattr(torch, d)) for m, d in ((target, dtypes[0]), (draft, dtypes[1])))  # fmt: skip
        expected, out = greedy(cast, cast_draft, PROMPTS["ragged"])
        same = 10 if dtypes[0] == "bfloat16" else None  # blocks differ from single tokens in its last bits
        assert out.sequences.shape == expected.sequences.shape
        assert torch.equal(out.sequences[:, :same], expected.sequences[:, :same]), dtypes
        settings = {"max_new_tokens": 8, "do_sample": True, "assistant_model": cast_draft, "lossy_policy": "strict"}
        assert cast.generate(**PROMPTS["ragged"], **settings).shape == (3, 9 + 8)
