"""Proves that strict greedy decoding gives `model.generate`'s own tokens, one by one, whatever the draft and its length.

Everything runs in float32, where a block forward and a one-token forward differ by rounding only. `greedy` refuses reference
texts in which such a difference could matter, and texts too monotonous to tell a right engine from a wrong one.
"""

from functools import cache
from typing import Any

import pytest
import torch
from support import tiny
from support.tiny import NEVER_EMITTED, NEW, assisted, greedy, some_eos
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

import hf_lossy_assist as hla
from hf_lossy_assist.models.row_cache import RowCache


RAGGED = (9, 1, 4, 14)  # prompt lengths of the batch: one row starts from a single token
GAMMAS = (1, 2, 5, 13, 40)


def constant(gamma: int) -> dict[str, Any]:
    return {"stop": {"name": "constant", "gamma": gamma}}


@cache
def reference(name: str, lengths: tuple[int, ...], eos: int, seed: int = 0) -> torch.Tensor:
    return greedy(tiny.shared(name), tiny.prompts(lengths, seed), eos_token_id=eos)


@cache
def draft_for(name: str, kind: str) -> Any:
    return tiny.draft_of(tiny.shared(name), kind)


# -- batches ------------------------------------------------------------------------------------------------------------


@pytest.mark.full(every=72)
@pytest.mark.nightly(every=18)
@pytest.mark.parametrize("kind", tiny.DRAFTS)
@pytest.mark.parametrize("name", tiny.BATCHED)
def test_ragged_batch(name, kind):
    model, draft, inputs = tiny.shared(name), draft_for(name, kind), tiny.prompts(RAGGED)
    width = max(RAGGED)
    whole = reference(name, RAGGED, NEVER_EMITTED)
    assert len(set(whole[:, width:].flatten().tolist())) > 8, "texts this monotonous prove nothing"
    eos = some_eos(whole, width)
    ended = reference(name, RAGGED, eos)
    lengths = {int((row != tiny.PAD).sum()) for row in ended[:, width:]}
    assert len(lengths) > 1, "no row ends before the others"
    for gamma in GAMMAS:
        out = assisted(model, inputs, draft, constant(gamma), eos_token_id=NEVER_EMITTED)
        assert torch.equal(out.sequences, whole), gamma
        rate = out.speculation.draft_acceptance_rate
        assert {"always": rate == 1.0, "never": rate == 0.0}.get(kind, 0.0 < rate < 1.0)
    for gamma in (2, 13):
        assert torch.equal(assisted(model, inputs, draft, constant(gamma), eos_token_id=eos).sequences, ended), gamma


@pytest.mark.full(every=48)
@pytest.mark.nightly(every=6)
@pytest.mark.parametrize("name", tiny.BATCHED)
def test_one_row(name):
    model = tiny.shared(name)
    for length in (1, 9):
        expected = reference(name, (length,), NEVER_EMITTED)
        for kind, gamma in (("often", 2), ("often", 40), ("never", 5)):
            out = assisted(
                model, tiny.prompts((length,)), draft_for(name, kind), constant(gamma), eos_token_id=NEVER_EMITTED
            )
            assert torch.equal(out.sequences, expected), (length, kind, gamma)


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


@pytest.mark.nightly
def test_text_that_fills_the_learned_positions():
    """GPT-2 has no position behind the last one, not even for the padding of a row that is ahead of the others."""
    model = tiny.build("gpt2", n_positions=14 + NEW)
    inputs = tiny.prompts((14, 14, 14, 3))
    expected = greedy(model, inputs, eos_token_id=NEVER_EMITTED)
    for kind in ("often", "rarely", "never"):
        for gamma in (1, 7, 40):
            draft = tiny.draft_of(model, kind)
            out = assisted(model, inputs, draft, constant(gamma), eos_token_id=NEVER_EMITTED)
            assert torch.equal(out.sequences, expected)


# -- one row: encoder-decoders, convolution states, candidate generators ----------------------------------------------------


@pytest.mark.full(every=18)
@pytest.mark.nightly(every=9)
@pytest.mark.parametrize("kind", tiny.DRAFTS)
@pytest.mark.parametrize("name", tiny.ONE_ROW)
def test_models_of_one_row(name, kind):
    for length, seed in ((14, 0), (9, 2), (1, 0)):
        expected = reference(name, (length,), NEVER_EMITTED, seed)
        eos = int(expected[0, -NEW // 2])
        for gamma in (1, 5, 13):
            for end in (NEVER_EMITTED, eos):
                out = assisted(
                    tiny.shared(name),
                    tiny.prompts((length,), seed),
                    draft_for(name, kind),
                    constant(gamma),
                    eos_token_id=end,
                )
                assert torch.equal(out.sequences, reference(name, (length,), end, seed)), (length, gamma, end)


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


@pytest.mark.nightly(every=3)
@pytest.mark.full(every=6)
@pytest.mark.parametrize(
    "target, draft, drafter",
    [
        ("t5", "t5", None),
        *(
            (t, "lfm2", d)
            for t in ("llama", "lfm2")
            for d in (None, hla.CompositeDrafter(first=hla.SuffixDrafter(min_match=1)))
        ),
    ],
    ids=["t5-model", "llama-model", "llama-composite", "lfm2-model", "lfm2-composite"],
)
@pytest.mark.parametrize("new", [1, 2, 9])
def test_a_prompt_of_one_token(target, draft, new, drafter):
    """The first round may draft nothing, so that the draft's cache has been fed nothing when it is rolled back by nothing."""
    inputs, settings = tiny.prompts((1,)), {"max_new_tokens": new, "eos_token_id": NEVER_EMITTED}
    out = assisted(
        tiny.shared(target), inputs, tiny.draft_of(tiny.shared(draft), "often"), drafter=drafter, **settings
    )
    assert torch.equal(out.sequences, greedy(tiny.shared(target), inputs, **settings))


@pytest.mark.parametrize("settings", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}], ids=str)
def test_candidate_generators(settings):
    for gamma in (1, 3, 10):
        for new in (1, 2, 7, NEW):
            more = settings | {"max_new_tokens": new, "num_assistant_tokens": gamma}
            out = assisted(tiny.shared("llama"), tiny.prompts((9,)), None, **more)
            expected = greedy(tiny.shared("llama"), tiny.prompts((9,)), max_new_tokens=new)
            assert torch.equal(out.sequences, expected)


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


@pytest.mark.parametrize("place", [4, 8], ids=["middle", "end"])
def test_padding_id_inside_a_prompt_without_mask(place):
    """Transformers then makes a mask of its own that hides the place. Either do the same or refuse: no other text."""
    ids = tiny.prompts((9,))["input_ids"]
    ids[0, place] = tiny.PAD
    expected = greedy(tiny.shared("llama"), {"input_ids": ids})
    try:
        out = assisted(tiny.shared("llama"), {"input_ids": ids}, draft_for("llama", "often"))
    except ValueError as error:
        assert "attention_mask" in str(error)
    else:
        assert torch.equal(out.sequences, expected)


def custom_mask() -> Any:
    """GPT-Neo cuts its causal mask from the sizes of q and k, which is wrong for rows that start at different slots."""
    shape = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8}
    return GPTNeoForCausalLM(GPTNeoConfig(**tiny.COMMON, hidden_size=32, max_position_embeddings=256, **shape))


def alibi() -> Any:
    """Falcon with alibi works the positions out from a mask of two dimensions."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True, "new_decoder_architecture": False}
    return FalconForCausalLM(FalconConfig(**tiny.COMMON, hidden_size=32, **shape))


def without_cache() -> Any:
    """The first GPT has no keys and values to keep."""
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(**tiny.COMMON, n_embd=32, n_layer=2, n_head=4))


@pytest.mark.parametrize("lengths", [RAGGED, (9,)], ids=["batch", "row"])
@pytest.mark.parametrize("make", [custom_mask, alibi, without_cache])
def test_unusual_attention_is_right_or_refused(make, lengths):
    torch.manual_seed(0)
    model, inputs = make().eval(), tiny.prompts(lengths)
    expected = greedy(model, inputs, eos_token_id=NEVER_EMITTED)
    try:
        out = assisted(model, inputs, tiny.draft_of(model, "often"), eos_token_id=NEVER_EMITTED)
    except ValueError as error:
        assert len(lengths) > 1 or make is without_cache, error
        assert type(model).__name__ in str(error)
    else:
        assert torch.equal(out.sequences, expected)


# -- processors, criteria, settings ---------------------------------------------------------------------------------------


@pytest.mark.full(every=24)
@pytest.mark.nightly(every=12)
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"encoder_repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 1},
        {"min_new_tokens": 10},
        {"bad_words_ids": [[5], [6, 7]]},
        {"suppress_tokens": [8, 9]},
        {"begin_suppress_tokens": [5]},
        {"exponential_decay_length_penalty": (5, 1.5)},
        {"sequence_bias": [[[11], 0.2], [[12, 13], 2.0]]},
        {"forced_eos_token_id": 3},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range((7 * len(ids) + 11 * row) % 50, 90))},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_logits_processors(settings):
    """Each position sees its own prefix, and each row its own place in the batch, also after other rows were dropped."""
    inputs, model = tiny.prompts(RAGGED), tiny.shared("qwen2")
    eos = some_eos(reference("qwen2", RAGGED, NEVER_EMITTED), max(RAGGED))
    for end in (eos, tiny.VOCABULARY - 1):
        expected = greedy(model, inputs, eos_token_id=end, **settings)
        for kind in ("often", "never"):
            out = assisted(model, inputs, draft_for("qwen2", kind), eos_token_id=end, **settings)
            assert torch.equal(out.sequences, expected), (end, kind)
        perfect = assisted(model, inputs, model, eos_token_id=end, **settings)
        assert perfect.speculation.draft_acceptance_rate == 1.0, (
            "the draft's scores are not processed like the target's"
        )


def test_none_is_a_setting():
    """`eos_token_id=None` and `top_k=None` at the call mean none, whatever the model's generation config says."""
    model = tiny.build("llama")
    inputs = tiny.prompts(RAGGED)
    model.generation_config.eos_token_id = some_eos(reference("llama", RAGGED, NEVER_EMITTED), max(RAGGED))
    draft = tiny.draft_of(model, "often")
    expected = greedy(model, inputs, eos_token_id=None)
    assert torch.equal(assisted(model, inputs, draft, eos_token_id=None).sequences, expected)
    model.generation_config.top_k = 2
    out = assisted(model, inputs, draft, do_sample=True, top_k=None, output_scores=True, max_new_tokens=1)
    assert out.scores[0].isfinite().all(), "top-k was applied although the call switched it off"
