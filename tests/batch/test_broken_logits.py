"""Logits that no distribution can be made of (NaN, +inf, −inf everywhere) are an error in one line, wherever the text comes to them and only there."""

import itertools
import math

import pytest
import torch
from support import small
from transformers import LogitsProcessor, LogitsProcessorList

import hf_lossy_assist as hla


VALUES = {"nan": math.nan, "inf": math.inf, "no token": -math.inf}
POLICIES = ["svip", hla.TopK(2), hla.BlockVerification()]


def breaking(model, value: float, after: int = 0):
    """From its position `after` on, this model's output layer gives `value`: for one token, or −inf for all."""

    def spoil(module, args, kwargs, output):
        late = kwargs["position_ids"] >= after  # (1 or B, Q)
        late = late[:, -output.logits.shape[1] :, None].expand(output.logits.shape[:2] + (1,))
        all_tokens = torch.full_like(output.logits, value)
        one_token = torch.cat([all_tokens[..., :1], output.logits[..., 1:]], dim=-1)
        output.logits = torch.where(late, all_tokens if value == -math.inf else one_token, output.logits)
        return output

    model.register_forward_hook(spoil, with_kwargs=True)
    return model


def written(target, draft, policy="strict", inputs=None, **settings):
    inputs = inputs or small.ragged((0, 3, 5))
    settings = {"max_new_tokens": 12, "do_sample": False, "top_k": 0} | settings
    if not settings["do_sample"]:
        del settings["top_k"]
    return hla.enable(target).generate(**inputs, assistant_model=draft, lossy_policy=policy, **settings)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("broken", ["target", "draft"])
def test_one_line_for_each(broken):
    """Each policy with each value, greedy and sampling in turn."""
    for n, (policy, kind) in enumerate(itertools.product(POLICIES, VALUES)):
        do_sample, target = bool(n % 2), small.llama()
        models = {"target": target, "draft": small.near(target)}
        breaking(models[broken], VALUES[kind], after=14)  # the unpadded prompts have 9, 6 and 4 tokens
        line = rf"^the {broken} model gave NaN or infinite logits in row [012], after \d+ new tokens$"
        with pytest.raises(ValueError, match=line):
            written(models["target"], models["draft"], policy, do_sample=do_sample)


def test_a_companion_too():
    target = small.llama()
    draft, companion = small.near(target), breaking(small.near(target, seed=9), math.nan)
    with pytest.raises(ValueError, match="^the companion model gave NaN or infinite logits in row 0, after 0 new"):
        written(target, draft, hla.Staged(companion), inputs=small.one(), do_sample=True)


class Forbidding(LogitsProcessor):
    """Leave no token behind texts of `length` tokens; `partly`: with another processor's help."""

    def __init__(self, length: int, first: int = 0):
        self.length, self.first = length, first

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] < self.length:
            return scores
        return scores.index_fill(1, torch.arange(self.first, scores.shape[1]), -math.inf)


class Remembering(Forbidding):
    def __call__(self, input_ids, scores):
        self.calls = getattr(self, "calls", 0) + 1
        return super().__call__(input_ids, scores)


@pytest.mark.parametrize("do_sample", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_mask_that_leaves_nothing_is_not_blamed_on_the_model(do_sample):
    target, draft = small.llama(), small.near(small.llama())
    forbidding, both = [Forbidding(14)], [Forbidding(14, first=50), Forbidding(14)]
    cases = [(rows, {"logits_processor": LogitsProcessorList(made)}, 5)
             for rows in (small.one(), small.ragged((0, 0, 3))) for made in (forbidding, both)]  # fmt: skip
    cases += [
        (small.one(), {"logits_processor": LogitsProcessorList([Remembering(14)])}, 5),
        (small.one(), {"suppress_tokens": list(range(small.VOCAB))}, 0),
        (small.one(), {"bad_words_ids": [[token] for token in range(small.VOCAB)]}, 0),
    ]
    line = "^logits_processor: no token is left, or scores are NaN or infinite, in (row|prompt) [02], after %d new tokens$"
    for inputs, settings, new in cases:
        with pytest.raises(ValueError, match=line % new):
            written(target, draft, inputs=inputs, do_sample=do_sample, **settings)
    prompts = [small.one()["input_ids"][0].tolist()]
    settings = {"assistant_model": draft, "lossy_policy": "strict", "max_new_tokens": 9, "do_sample": do_sample}
    with pytest.raises(ValueError, match=line % 5):
        list(hla.generate_many(target, prompts, logits_processor=lambda ids: [Remembering(14)], **settings))


# -- and what must go on --------------------------------------------------------------------------------------------------


def test_values_made_finite_are_no_error():
    """`remove_invalid_values=True` does it before the logits are looked at, as in stock `generate`."""
    for value in (math.nan, math.inf):
        target = breaking(small.llama(), value)
        settings = {"remove_invalid_values": True, "max_new_tokens": 8, "do_sample": False}
        plain = type(target).generate(target, **small.ragged(), **settings)
        assert torch.equal(written(target, small.near(small.llama()), **settings), plain)


class DeadEnd(LogitsProcessor):
    """Behind token `token` nothing is allowed, as where a grammar has no way on."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores):
        return scores.masked_fill(input_ids[:, -1:] == self.token, -math.inf)


@pytest.mark.parametrize("policy", ["svip", pytest.param("strict", marks=pytest.mark.full)])
def test_what_only_a_rejected_draft_came_to_is_no_error(policy):
    """The draft always writes a token that the target never does, and behind which there is no distribution at all."""
    target, token = small.llama(), 11
    draft = small.near(target)
    for model, sign in ((target, -1.0), (draft, 1.0)):
        model.lm_head = torch.nn.Linear(32, small.VOCAB, dtype=model.dtype)
        with torch.no_grad():
            model.lm_head.weight.copy_(small.llama().lm_head.weight)
            model.lm_head.bias.zero_()[token] = sign * 1e4
    processors = LogitsProcessorList([DeadEnd(token)])
    settings = {"max_new_tokens": 10, "logits_processor": processors}
    plain = type(target).generate(target, **small.ragged(), **settings, do_sample=False)
    assert torch.equal(written(target, draft, policy, **settings), plain)
    new = written(target, draft, policy, **settings, do_sample=True)[:, -10:]
    assert not (new == token).any()


def test_a_token_that_only_the_target_has_is_all_that_is_left():
    """A processor allows one token, and the draft, whose vocabulary is smaller, does not know it."""
    target, draft = small.llama(vocab=98), small.llama(seed=1, vocab=97)
    settings = {"max_new_tokens": 6, "prefix_allowed_tokens_fn": lambda row, ids: [97]}
    for do_sample in (False, True):
        new = written(target, draft, do_sample=do_sample, **settings)[:, -6:]
        assert (new == 97).all()


def test_rows_that_have_ended_and_places_that_were_not_sent_do_not_count():
    """Row 0 ends at once; what the models give behind its end is no matter. Longer rows go on."""
    target = small.llama()
    inputs = small.ragged((0, 5, 5, 5, 5))  # one of five: too few to leave the batch
    first = type(target).generate(target, **inputs, max_new_tokens=1, do_sample=False)[0, -1]
    settings = {"eos_token_id": int(first), "pad_token_id": 0, "max_new_tokens": 3, "do_sample": False}
    plain = type(target).generate(target, **inputs, **settings)
    assert (plain[0, -2:] == 0).all() and (plain[1:, -2:] != 0).any()
    spoiled, draft = breaking(small.llama(), math.nan, after=9), breaking(small.near(target), math.nan, after=9)
    assert torch.equal(written(spoiled, draft, inputs=inputs, **settings), plain)
