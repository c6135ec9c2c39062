"""Shared by the tests of `generate_many` and of rotary embeddings: texts alone and together."""

import copy
from typing import Any

import torch

import hf_lossy_assist as hla
from hf_lossy_assist.generation import scheduler
from support import small
from support.tiny import NEVER_EMITTED


LENGTHS = (9, 3, 14, 6, 1, 11, 7)
SETTINGS = {"do_sample": False, "max_new_tokens": 12}
ENDS = [21, 40, 62, 75, 90, 33, 11, 58]  # end some of the texts


def enabled_pair():
    """A target of float64 whose texts end in several ways, and a draft that is often right."""
    target = small.llama()
    target.generation_config.eos_token_id = ENDS
    return hla.enable(target), small.near(target)


def prompts(lengths=LENGTHS):
    return [small.one(width, seed=n)["input_ids"][0].tolist() for n, width in enumerate(lengths)]


def alone(target, prompt, **settings):
    """Return what `generate` writes for one prompt, without padding behind its end."""
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    out = target.generate(torch.tensor([prompt]), attention_mask=mask, **settings)
    return out[0, len(prompt) :].tolist()


def together(pair, texts, policy="strict", **settings):
    target, draft = pair
    found = list(hla.generate_many(target, texts, assistant_model=draft, lossy_policy=policy, **SETTINGS | settings))
    assert sorted(result.index for result in found) == list(range(len(texts)))
    return [result.token_ids for result in sorted(found, key=lambda result: result.index)]


NEW = 30


def alone_on_copy(model: Any, prompt: torch.Tensor, **settings: Any) -> list[int]:
    """The new tokens that `generate` writes behind `prompt` (n,), on a model that has seen no other text."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": NEVER_EMITTED} | settings
    mask = torch.ones_like(prompt)[None]
    out = copy.deepcopy(model).generate(input_ids=prompt[None], attention_mask=mask, **settings)
    return out[0, len(prompt) :].tolist()


def count_read(monkeypatch: Any) -> list[int]:
    """Return a list that gets the number of prompt tokens that the target reads in each block from now on."""
    counts, original = [], scheduler.read_some

    def counted(call, most):
        before = sum(call.target.lengths)
        out = original(call, most)
        counts.append(sum(call.target.lengths) - before)
        return out

    monkeypatch.setattr(scheduler, "read_some", counted)
    return counts
