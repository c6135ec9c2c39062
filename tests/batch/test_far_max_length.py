"""A `max_new_tokens` that is never reached costs nothing: the texts' storage grows with the texts, as the caches do."""

import pytest
import torch
from support import small
from transformers import Cache

import hf_lossy_assist as hla
from hf_lossy_assist.batch import rows as sequences
from hf_lossy_assist.generation.runner import Runner


FAR = 10**8  # four rows of int64 would be 3.2 GB


class Looking(Runner):
    """Sees what the call has allocated when its rounds are over."""

    def decode(self, call):
        stats = super().decode(call)
        self.found = list(tensors(call, set()))
        return stats


def tensors(thing, seen: set[int]):
    """Every tensor that an object of this package, or a cache, holds on to; not the weights of models."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors(value, seen)
    elif type(thing).__module__.startswith("hf_lossy_assist") or isinstance(thing, Cache):
        yield from tensors(vars(thing), seen)


@pytest.mark.parametrize("policy", ["svip", "staged", "prompt lookup"])
def test_nothing_is_sized_by_it(policy):
    target, inputs = small.llama(), small.ragged((0, 1, 2, 3))
    settings = {"do_sample": False, "max_new_tokens": FAR, "eos_token_id": list(range(small.VOCAB)), "pad_token_id": 0}
    if policy == "prompt lookup":
        runner, inputs = Looking(hla.LossyPolicy().with_fallback(), None), small.one()
        settings["prompt_lookup_num_tokens"] = 3
    else:
        runner = Looking(hla.Staged(small.llama(seed=1)) if policy == "staged" else policy, small.near(target))
    out = type(target).generate(target, **inputs, **settings, custom_generate=runner)
    assert out.shape[0] == len(inputs["input_ids"])
    assert any(t.dtype == torch.int64 and t.dim() == 2 for t in runner.found), "the texts are among them"
    assert max(t.untyped_storage().nbytes() for t in runner.found) < 2**20


def test_the_text_is_the_same_while_storage_grows(monkeypatch):
    monkeypatch.setattr(sequences, "STEP", 7)
    settings, target = {"repetition_penalty": 1.2}, small.llama()
    for inputs in (small.ragged((0, 3, 5)), small.one()):
        plain = type(target).generate(target, **inputs, max_new_tokens=30, do_sample=False, **settings)
        drafted = hla.enable(target).generate(
            **inputs, max_new_tokens=30, do_sample=False, assistant_model=small.near(target), lossy_policy="strict", **settings
        )  # fmt: skip
        assert torch.equal(drafted, plain)
