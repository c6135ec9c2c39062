"""Models that cannot be decoded in rows: the same call runs the policy in Transformers' assisted loop, one row, and says so once."""

import copy
import warnings

import pytest
import torch
from support import tiny
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_lossy_assist as hla
from hf_lossy_assist.generation import model_checks
from hf_lossy_assist.models.facts import CACHE


AttentionInterface.register("of a user", sdpa_attention_forward)
AttentionMaskInterface.register("of a user", sdpa_mask)
SETTINGS = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
SETTINGS |= {"eos_token_id": tiny.NEVER_EMITTED}
STANDS = r"^LlamaForCausalLM cannot be decoded in rows \(its attention implementation is 'of a user'"
SAID = STANDS + r"[^\n]*\): Transformers' own assisted loop runs the policy, one row a call$"


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    monkeypatch.setattr(model_checks, "_warned", set())


def odd(model=None):
    model = tiny.build("llama") if model is None else copy.deepcopy(model)
    model.set_attn_implementation("of a user")
    return model


def often():
    return tiny.draft_of(tiny.shared("llama"), "often")


def expected(rows=(9,), **settings):
    return tiny.shared("llama").generate(**tiny.prompts(rows), **SETTINGS | settings)


@pytest.mark.parametrize(
    "policy, settings", [("strict", {}), ("svip", {}), ("strict", {"repetition_penalty": 1.3, "output_scores": True})]
)
def test_greedy_texts_are_generates_and_one_warning_says_where_they_are_made(policy, settings):
    model, draft, wanted = hla.enable(odd()), often(), expected(**settings)
    given = tiny.prompts((9,)) | SETTINGS | settings | {"assistant_model": draft, "lossy_policy": policy}
    with pytest.warns(UserWarning, match=SAID):
        out = model.generate(**given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = model.generate(**given)
    for found in (out, again):
        assert torch.equal(found.sequences, wanted.sequences)
        assert 0 < found.speculation.draft_acceptance_rate <= 1 and found.speculation.num_spec_steps > 1
    if settings:
        assert torch.allclose(torch.cat(out.scores), torch.cat(wanted.scores), atol=1e-4)
    assert [report.num_spec_steps for report in hla.reports(model)] == [out.speculation.num_spec_steps] * 2
    assert "_get_candidate_generator" not in vars(model)
    model_checks._warned.clear()
    with pytest.warns(UserWarning, match=SAID):  # a draft without rows
        out = hla.enable(tiny.build("llama")).generate(**given | {"assistant_model": odd(draft)})
    assert torch.equal(out.sequences, wanted.sequences) and out.speculation.num_spec_steps


def test_settings_of_drafts_count():
    model, settings = hla.enable(odd()), tiny.prompts((9,)) | SETTINGS | {"assistant_model": often()}
    assert model.generate(**settings, lossy_policy="strict", num_assistant_tokens=2).speculation.num_spec_tokens == 2
    with hla.in_transformers_loop(hla.disable(model), "strict") as loop:
        model.generate(**settings, num_assistant_tokens=3)
        assert loop.speculation.num_spec_tokens == 3


def test_a_standing_policy():
    """A call that the other loop cannot run either is Transformers' plain text, as for other models."""
    model = hla.enable(odd(), often(), "svip")
    with pytest.warns(UserWarning, match=SAID):
        assert torch.equal(model.generate(**tiny.prompts((9,)), **SETTINGS).sequences, expected().sequences)
    assert len(hla.reports(model)) == 1
    with pytest.warns(UserWarning, match="^Transformers' own generate wrote this text, without the policy"):
        out = model.generate(**tiny.prompts((9, 4)), **SETTINGS)
    assert torch.equal(out.sequences, expected((9, 4)).sequences) and len(hla.reports(model)) == 1


def test_an_error_behind_the_first_round_comes_out():
    def fails(ids, scores):
        if ids.shape[1] > 16:
            raise KeyError("mine")
        return torch.zeros(1, dtype=torch.bool)

    model = hla.enable(odd(), often(), "strict")
    with pytest.raises(KeyError, match="mine"):
        model.generate(**tiny.prompts((9,)), **SETTINGS, stopping_criteria=[fails])
    assert "_get_candidate_generator" not in vars(model)
    with pytest.warns(UserWarning, match=SAID):
        assert torch.equal(model.generate(**tiny.prompts((9,)), **SETTINGS).sequences, expected().sequences)


REFUSED = {
    "rows": ({"input_ids": torch.arange(4, 12).view(2, 4)}, r"^Transformers' own assisted loop has one row, this call has 2: Llama[^\n]*so pass one prompt"),
    "a drafter": ({"assistant_model": None, "drafter": "suffix"}, f"{STANDS}.*drafter=… is for rows: leave it out"),
    "a lookup": ({"assistant_model": None, "prompt_lookup_num_tokens": 3}, f"{STANDS}.*prompt_lookup_num_tokens=… is for rows"),
    "beams": ({"num_beams": 2}, "num_beams"),
    "a generator": ({"generator": torch.Generator()}, f"{STANDS}.*generator=… is for rows"),
    "a cache": ({CACHE: DynamicCache()}, f"{STANDS}.*{CACHE}=… is for rows"),
    "several samples": ({"do_sample": True, "num_return_sequences": 2}, "^generate cannot run with these arguments: num_return_sequences has to be 1"),
    "a stop for rows": ({"lossy_policy": hla.JointGoodput()}, "weighs the rows of a batch against each other[^\n]*pass one prompt"),
    "a runner": ({"lossy_policy": None, "assistant_model": None, "custom_generate": hla.Runner("strict", tiny.shared("llama"))}, f"{STANDS}.*enable the target and pass lossy_policy=…"),
}  # fmt: skip


def test_what_that_loop_cannot_do_is_refused_in_one_line():
    model = hla.enable(odd())
    given = {"input_ids": torch.arange(4, 9)[None], "assistant_model": often(), "lossy_policy": "strict"}
    for settings, line in REFUSED.values():
        with pytest.raises(ValueError, match=line) as error:
            model.generate(**given | {"max_new_tokens": 8} | settings)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=STANDS):
        list(hla.generate_many(odd(), [[4, 5]], assistant_model=often(), max_new_tokens=4))


class Counting(type(tiny.shared("llama"))):
    """Its logits depend on how often it was called, so blocks write another text."""

    calls = 0

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        self.calls += 1
        out.logits = out.logits.roll(self.calls, dims=-1)
        return out


def test_a_model_whose_blocks_write_another_text_is_refused():
    model = copy.deepcopy(tiny.shared("llama"))
    model.__class__ = Counting
    given = tiny.prompts((9,)) | {"assistant_model": often(), "lossy_policy": "strict", "max_new_tokens": 8}
    line = r"^Counting cannot be decoded in rows \([^\n]*, nor in Transformers' own assisted loop \(a trial"
    with pytest.raises(ValueError, match=line):
        hla.enable(model).generate(**given)
