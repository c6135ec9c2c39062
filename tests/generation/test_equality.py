"""Strict greedy decoding is `generate` for what the rows of test_lossless.py have not: other architectures, models of one row, odd vocabularies and masks.

`greedy` refuses reference texts in which rounding could matter; texts too monotonous to tell a right engine from a wrong one are refused here.
"""

from functools import cache

import pytest
import torch
from support import tiny
from support.tiny import NEVER_EMITTED, NEW, assisted, greedy, some_eos

import hf_lossy_assist as hla


pytestmark = pytest.mark.full
RAGGED = (9, 1, 4, 14)  # prompt lengths of the batch: one row starts from a single token
GAMMAS = {kind: {"stop": {"name": "constant", "gamma": gamma}} for kind, gamma in zip(tiny.DRAFTS, (13, 5, 1, 5), strict=True)}  # fmt: skip


@cache
def reference(name, lengths, eos):
    return greedy(tiny.shared(name), tiny.prompts(lengths), eos_token_id=eos)


@cache
def draft_for(name, kind):
    return tiny.draft_of(tiny.shared(name), kind)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2"])
def test_ragged_batch(name):
    whole = reference(name, RAGGED, NEVER_EMITTED)
    assert len(set(whole[:, 14:].flatten().tolist())) > 8, "texts this monotonous prove nothing"
    eos = some_eos(whole, 14)
    assert len({int((row != tiny.PAD).sum()) for row in reference(name, RAGGED, eos)[:, 14:]}) > 1
    for (kind, policy), end in zip(GAMMAS.items(), (NEVER_EMITTED, eos, eos, NEVER_EMITTED), strict=True):
        out = assisted(tiny.shared(name), tiny.prompts(RAGGED), draft_for(name, kind), policy, eos_token_id=end)
        assert torch.equal(out.sequences, reference(name, RAGGED, end)), (kind, end)
        rate = out.speculation.draft_acceptance_rate
        assert {"always": rate == 1.0, "never": rate == 0.0}.get(kind, 0.0 < rate < 1.0)


@pytest.mark.parametrize("name", tiny.ONE_ROW)
def test_models_of_one_row(name):
    for length in (14, 1):
        ends = (NEVER_EMITTED, int(reference(name, (length,), NEVER_EMITTED)[0, -NEW // 2]))
        for (kind, policy), end in zip(GAMMAS.items(), ends * 2 if length > 1 else ends[::-1] * 2, strict=True):
            out = assisted(tiny.shared(name), tiny.prompts((length,)), draft_for(name, kind), policy, eos_token_id=end)
            assert torch.equal(out.sequences, reference(name, (length,), end)), (length, kind, end)


def test_target_and_draft_of_different_kinds():
    """A row cache on one side, Transformers' cropped cache on the other, and a T5 draft with a smaller encoder of its own.

    A first round behind one token may draft nothing, so that the draft's cache has been fed nothing when it is rolled back by nothing.
    """
    small = tiny.build("t5", seed=1, d_model=16, num_layers=1)
    near = {name: draft_for(name, "often") for name in ("t5", "lfm2", "llama")}
    for target, draft in (("t5", small), ("t5", near["t5"]), ("llama", near["lfm2"]), ("lfm2", near["llama"]), ("lfm2", near["lfm2"])):  # fmt: skip
        for drafter in (None, hla.CompositeDrafter(first=hla.SuffixDrafter(min_match=1)))[: 1 + (target != "t5")]:
            for length, new in ((9, 12), (1, 1), (1, 2), (1, 9)):
                model, inputs = tiny.shared(target), tiny.prompts((length,))
                settings = {"max_new_tokens": new, "eos_token_id": NEVER_EMITTED}
                out = assisted(model, inputs, draft, drafter=drafter, **settings)
                assert torch.equal(out.sequences, greedy(model, inputs, **settings)), (target, drafter, length, new)


def test_padded_vocabularies():
    """One tokenizer padded to 97 by one maker and to 98 by the other, and the surplus id is really written by the target."""
    narrow, wide = tiny.shared("llama"), tiny.build("llama", seed=1, vocab_size=98)
    inputs = tiny.prompts(RAGGED)
    out = assisted(narrow, inputs, wide, eos_token_id=NEVER_EMITTED)
    assert torch.equal(out.sequences, reference("llama", RAGGED, NEVER_EMITTED))
    with torch.no_grad():
        wide.lm_head.weight[97] = wide.lm_head.weight[:97].std() * torch.randn(32) * 2
    expected = greedy(wide, inputs, eos_token_id=NEVER_EMITTED)
    assert 97 in expected, "the target never writes the id that the draft lacks"
    assert torch.equal(assisted(wide, inputs, narrow, eos_token_id=NEVER_EMITTED).sequences, expected)


def test_prompts_of_int32_and_with_the_padding_id_inside():
    """Without a mask Transformers makes one that hides the place. Either do the same or refuse: no other text."""
    model, draft, ids = tiny.shared("llama"), draft_for("llama", "often"), tiny.prompts((9,))["input_ids"]
    assert torch.equal(assisted(model, {"input_ids": ids.int()}, draft).sequences, greedy(model, {"input_ids": ids}))
    for place in (4, 8):  # in the middle, and at the end
        hidden = ids.clone()
        hidden[0, place] = tiny.PAD
        try:
            out = assisted(model, {"input_ids": hidden}, draft)
        except ValueError as error:
            assert "attention_mask" in str(error)
        else:
            assert torch.equal(out.sequences, greedy(model, {"input_ids": hidden}))


def test_the_drafts_scores_are_processed_like_the_targets():
    """Each position sees its own prefix, and each row its own place in the batch, also after other rows were dropped."""
    inputs, model = tiny.prompts(RAGGED), tiny.shared("qwen2")
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "sequence_bias": [[[11], 0.2], [[12, 13], 2.0]]}
    function = {"prefix_allowed_tokens_fn": lambda row, ids: list(range((7 * len(ids) + 11 * row) % 50, 90))}
    settings["eos_token_id"] = some_eos(reference("qwen2", RAGGED, NEVER_EMITTED), max(RAGGED))
    expected = greedy(model, inputs, **settings | function)
    for kind in ("often", "never"):
        out = assisted(model, inputs, draft_for("qwen2", kind), **settings | function)
        assert torch.equal(out.sequences, expected), kind
    assert assisted(model, inputs, model, **settings).speculation.draft_acceptance_rate == 1.0
