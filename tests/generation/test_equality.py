"""Proves that strict greedy decoding gives `model.generate`'s own tokens, one by one, whatever the draft and its length.

Everything runs in float32, where a block forward and a one-token forward differ by rounding only. `greedy` refuses reference
texts in which such a difference could matter, and texts too monotonous to tell a right engine from a wrong one.
"""

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from support import tiny
from support.tiny import NEVER_EMITTED, NEW, assisted, greedy, some_eos

import hf_lossy_assist as hla
from hf_lossy_assist.models.row_cache import RowCache


RAGGED = (9, 1, 4, 14)  # prompt lengths of the batch: one row starts from a single token


def constant(gamma: int) -> dict[str, Any]:
    return {"stop": {"name": "constant", "gamma": gamma}}


@cache
def reference(name: str, lengths: tuple[int, ...], eos: int, seed: int = 0) -> torch.Tensor:
    return greedy(tiny.shared(name), tiny.prompts(lengths, seed), eos_token_id=eos)


@cache
def draft_for(name: str, kind: str) -> Any:
    return tiny.draft_of(tiny.shared(name), kind)


# -- batches ------------------------------------------------------------------------------------------------------------


ONLY_HERE = {"llama", "qwen2", "qwen3", "gemma2"}  # the others are targets of test_lossless.py


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in ONLY_HERE else pytest.mark.nightly)
        for name in tiny.BATCHED
    ],
)
def test_ragged_batch(name):
    model, inputs, width = tiny.shared(name), tiny.prompts(RAGGED), max(RAGGED)
    whole = reference(name, RAGGED, NEVER_EMITTED)
    assert len(set(whole[:, width:].flatten().tolist())) > 8, "texts this monotonous prove nothing"
    eos = some_eos(whole, width)
    ended = reference(name, RAGGED, eos)
    lengths = {int((row != tiny.PAD).sum()) for row in ended[:, width:]}
    assert len(lengths) > 1, "no row ends before the others"
    for kind, gamma in (("always", 40), ("often", 5), ("rarely", 13), ("never", 1), ("never", 5)):
        out = assisted(model, inputs, draft_for(name, kind), constant(gamma), eos_token_id=NEVER_EMITTED)
        assert torch.equal(out.sequences, whole), (kind, gamma)
        rate = out.speculation.draft_acceptance_rate
        assert {"always": rate == 1.0, "never": rate == 0.0}.get(kind, 0.0 < rate < 1.0)
    for kind, gamma in (("often", 13), ("rarely", 2)):
        out = assisted(model, inputs, draft_for(name, kind), constant(gamma), eos_token_id=eos)
        assert torch.equal(out.sequences, ended), (kind, gamma)


def test_finished_rows_are_dropped(monkeypatch):
    """The rows that go on are the same ones after the caches were narrowed."""
    counts, select = [], RowCache.select
    monkeypatch.setattr(RowCache, "select", lambda cache, rows: (counts.append(len(rows)), select(cache, rows))[1])
    lengths = (9, 1, 4, 14, 6, 3, 11, 2)
    eos = some_eos(reference("qwen3", lengths, NEVER_EMITTED), max(lengths))
    expected = reference("qwen3", lengths, eos)
    out = assisted(tiny.shared("qwen3"), tiny.prompts(lengths), draft_for("qwen3", "often"), eos_token_id=eos)
    assert torch.equal(out.sequences, expected)
    assert counts and len(set(counts)) > 1, "this batch was meant to be narrowed more than once"


# -- one row: encoder-decoders, convolution states, candidate generators ----------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", tiny.ONE_ROW)
def test_models_of_one_row(name):
    for length, seed in ((14, 0), (1, 0)):
        expected = reference(name, (length,), NEVER_EMITTED, seed)
        ends = (NEVER_EMITTED, int(expected[0, -NEW // 2]))
        inputs = tiny.prompts((length,), seed)
        for (kind, gamma), end in itertools.product(zip(tiny.DRAFTS, (13, 5, 1, 5), strict=True), ends):
            out = assisted(tiny.shared(name), inputs, draft_for(name, kind), constant(gamma), eos_token_id=end)
            assert torch.equal(out.sequences, reference(name, (length,), end, seed)), (length, kind, gamma, end)


@pytest.mark.full
def test_target_and_draft_of_different_kinds():
    """A row cache on one side, Transformers' cropped cache on the other; and a T5 draft with its own, smaller encoder."""
    inputs = tiny.prompts((9,))
    for target, draft in (("llama", "lfm2"), ("lfm2", "llama")):
        out = assisted(tiny.shared(target), inputs, tiny.shared(draft), eos_token_id=NEVER_EMITTED)
        assert torch.equal(out.sequences, reference(target, (9,), NEVER_EMITTED))
    small = tiny.build("t5", seed=1, d_model=16, num_layers=1)
    out = assisted(tiny.shared("t5"), tiny.prompts((14,)), small, eos_token_id=NEVER_EMITTED)
    assert torch.equal(out.sequences, reference("t5", (14,), NEVER_EMITTED))


@pytest.mark.full
def test_a_prompt_of_one_token():
    """The first round may draft nothing, so that the draft's cache has been fed nothing when it is rolled back by nothing."""
    for target, draft in (("t5", "t5"), ("llama", "lfm2"), ("lfm2", "lfm2")):
        model, inputs, near = tiny.shared(target), tiny.prompts((1,)), tiny.draft_of(tiny.shared(draft), "often")
        for drafter in (None, hla.CompositeDrafter(first=hla.SuffixDrafter(min_match=1)))[: 1 + (target != "t5")]:
            for new in (1, 2, 9):
                settings = {"max_new_tokens": new, "eos_token_id": NEVER_EMITTED}
                out = assisted(model, inputs, near, drafter=drafter, **settings)
                assert torch.equal(out.sequences, greedy(model, inputs, **settings)), (target, drafter, new)


# -- vocabularies, dtypes, inputs -----------------------------------------------------------------------------------------


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


def test_int32_prompt():
    inputs = tiny.prompts((9,))
    ids = inputs["input_ids"].int()
    out = assisted(tiny.shared("llama"), inputs | {"input_ids": ids}, draft_for("llama", "often"))
    assert torch.equal(out.sequences, greedy(tiny.shared("llama"), inputs))


def test_padding_id_inside_a_prompt_without_mask():
    """Transformers then makes a mask of its own that hides the place. Either do the same or refuse: no other text."""
    for place in (4, 8):  # in the middle, and at the end
        ids = tiny.prompts((9,))["input_ids"]
        ids[0, place] = tiny.PAD
        expected = greedy(tiny.shared("llama"), {"input_ids": ids})
        try:
            out = assisted(tiny.shared("llama"), {"input_ids": ids}, draft_for("llama", "often"))
        except ValueError as error:
            assert "attention_mask" in str(error)
        else:
            assert torch.equal(out.sequences, expected)


@pytest.mark.full
def test_the_drafts_scores_are_processed_like_the_targets():
    """Each position sees its own prefix, and each row its own place in the batch, also after other rows were dropped."""
    inputs, model = tiny.prompts(RAGGED), tiny.shared("qwen2")
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "sequence_bias": [[[11], 0.2], [[12, 13], 2.0]]}
    function = {"prefix_allowed_tokens_fn": lambda row, ids: list(range((7 * len(ids) + 11 * row) % 50, 90))}
    for end in (some_eos(reference("qwen2", RAGGED, NEVER_EMITTED), max(RAGGED)), tiny.VOCABULARY - 1):
        expected = greedy(model, inputs, eos_token_id=end, **settings | function)
        for kind in ("often", "never"):
            out = assisted(model, inputs, draft_for("qwen2", kind), eos_token_id=end, **settings | function)
            assert torch.equal(out.sequences, expected), (end, kind)
        assert assisted(model, inputs, model, eos_token_id=end, **settings).speculation.draft_acceptance_rate == 1.0
