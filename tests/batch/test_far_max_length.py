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


@pytest.mark.full(every=3)
@pytest.mark.parametrize("policy", ["strict", "svip", "staged", "fallback"])
@pytest.mark.parametrize("kind", ["llama", "prompt lookup"])
def test_nothing_is_sized_by_it(kind, policy):
    target = small.llama()
    draft = None if kind == "prompt lookup" else small.near(target)
    policies = {
        "staged": hla.Staged(small.llama(seed=1)),
        "fallback": hla.LossyPolicy().with_fallback(),
    }
    if (policy, kind) in (("staged", "prompt lookup"), ("svip", "prompt lookup")):
        policy = "strict"
    runner = Looking(policies.get(policy, policy), draft)
    inputs = small.ragged((0, 1, 2, 3)) if kind == "llama" else small.one()
    settings = {"do_sample": False, "max_new_tokens": FAR, "eos_token_id": list(range(small.VOCAB)), "pad_token_id": 0}
    settings |= {} if draft is not None else {"prompt_lookup_num_tokens": 3}
    out = type(target).generate(target, **inputs, **settings, custom_generate=runner)
    assert out.shape[0] == len(inputs["input_ids"])
    assert any(t.dtype == torch.int64 and t.dim() == 2 for t in runner.found), "the texts are among them"
    assert max(t.untyped_storage().nbytes() for t in runner.found) < 2**20


@pytest.mark.full(every=2)
@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.2}], ids=["plain", "prefixes"])
def test_the_text_is_the_same_while_storage_grows(step, settings, monkeypatch):
    monkeypatch.setattr(sequences, "STEP", step)
    target = small.llama()
    for inputs in (small.ragged((0, 3, 5)), small.one()):
        plain = type(target).generate(target, **inputs, max_new_tokens=30, do_sample=False, **settings)
        drafted = hla.enable(target).generate(
            **inputs, max_new_tokens=30, do_sample=False, assistant_model=small.near(target), lossy_policy="strict", **settings
        )  # fmt: skip
        assert torch.equal(drafted, plain)
