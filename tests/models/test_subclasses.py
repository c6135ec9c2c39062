"""A subclass of a tested architecture is tried like any other model: it may keep a state of its own."""

import copy

import pytest
import torch
from support import small
from transformers import LlamaForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist.models.probe import why_not_rows


class Counting(LlamaForCausalLM):
    """Its logits depend on how often it was called, as a recurrent state would have it."""

    calls = 0

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        out = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        self.calls += 1
        out.logits = out.logits.roll(self.calls, dims=-1)
        return out


class Harmless(LlamaForCausalLM):
    pass


def of(kind):
    model = copy.deepcopy(small.llama())
    model.__class__ = kind
    return model


def test_a_state_of_its_own_is_found():
    model = of(Counting)
    assert "trial" in why_not_rows(model)
    with pytest.raises(ValueError, match="^Counting cannot be decoded in blocks [^\n]*$"):
        hla.enable(model).generate(
            **small.one(), max_new_tokens=8, assistant_model=small.llama(), lossy_policy="strict"
        )


def test_one_that_changes_nothing_serves():
    model = of(Harmless)
    assert why_not_rows(model) is None
    settings = {"max_new_tokens": 8, "do_sample": False}
    out = hla.enable(model).generate(
        **small.ragged(), **settings, assistant_model=small.near(model), lossy_policy="strict"
    )
    assert torch.equal(out, small.llama().generate(**small.ragged(), **settings))
