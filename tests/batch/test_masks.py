"""Prompts with tokens that the mask hides: padding, holes, and caches that were filled with them. Always the text of `generate`."""

import copy

import pytest
import torch
from support import tiny

from hf_lossy_assist.models.cache_name import CACHE, cache_of


NEVER = {"eos_token_id": tiny.NEVER_EMITTED}


def masked(*rows, seed=0):
    """Random prompts under masks written as strings: `masked("..xx.x")`, x for a token that is seen."""
    mask = torch.tensor([[int(c == "x") for c in row] for row in rows])
    ids = torch.randint(4, tiny.VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": mask}


def longer(sequences, prompt, tokens=3, seed=5):
    """The inputs of the next turn: the text so far, `tokens` more, and the mask that belongs to all of it."""
    more = torch.randint(4, tiny.VOCABULARY, (len(sequences), tokens), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat([sequences, more], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : prompt["attention_mask"].shape[1]] = prompt["attention_mask"]
    return {"input_ids": ids, "attention_mask": mask}


HOLES = {
    "one row": ("xx.x..xxxx",),
    "ragged": ("xxx.xx.xxx", "...xxxxxxx", "..x.x...xx"),
    "one token each": (".........x", "x........x"),
}


@pytest.mark.parametrize("rows", HOLES.values(), ids=HOLES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_mask_with_holes_gives_the_text_of_generate(name, rows):
    """gemma3's window of 8 is shorter than the text, so a row of it runs on Transformers' own cache and a batch is refused."""
    model, inputs = tiny.shared(name), masked(*rows)
    if name == "gemma3" and len(rows) > 1:
        with pytest.raises(ValueError, match=r"its window counts .* attention_mask hides .* batch has \d"):
            tiny.assisted(model, inputs, tiny.draft_of(model, "often"), **NEVER)
        return
    expected = tiny.greedy(model, inputs, **NEVER)
    out = tiny.assisted(model, inputs, tiny.draft_of(model, "often"), **NEVER)
    assert torch.equal(out.sequences, expected)
    assert 0 < out.speculation.draft_acceptance_rate <= 1


@pytest.mark.parametrize("drafting", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}], ids=str)
def test_holes_with_other_ways_to_draft(drafting):
    model, inputs = tiny.shared("llama"), masked("xx.x..xxxx")
    expected = tiny.greedy(model, inputs, **NEVER)
    assert torch.equal(tiny.assisted(model, inputs, None, **drafting, **NEVER).sequences, expected)


def test_processors_see_what_generate_shows_them():
    """Hidden tokens too: a repeated one is penalised, and an n-gram may not come again, wherever it is hidden."""
    settings = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2} | NEVER
    model, inputs = tiny.shared("llama"), masked("xxx.xx.xxx", "...xxxxxxx")
    expected = tiny.greedy(model, inputs, **settings)
    assert not torch.equal(expected, tiny.greedy(model, inputs, **NEVER))
    assert torch.equal(tiny.assisted(model, inputs, tiny.draft_of(model, "often"), **settings).sequences, expected)


def test_sampling_with_holes_has_the_law_of_the_row_without_them():
    model, seen = tiny.shared("llama"), masked("xx.x..xxxx")
    short = {"input_ids": seen["input_ids"][:, seen["attention_mask"][0].bool()]}
    texts = []
    for inputs in (seen, short):
        torch.manual_seed(0)
        out = tiny.assisted(model, inputs, tiny.draft_of(model, "often"), do_sample=True, **NEVER)
        texts.append(out.sequences[:, inputs["input_ids"].shape[1] :])
    assert torch.equal(*texts)


PADDED = {"padding": ("....xxxxxxxx",), "holes": ("..xx.xxx.xxx",)}


@pytest.mark.parametrize("rows", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_a_cache_goes_on_between_this_package_and_transformers_either_way(name, rows):
    """A turn here or there, then a second one here or there: four ways, one text."""
    model = tiny.shared(name)
    prompt, draft = masked(*rows), tiny.draft_of(model, "often")
    stock = model.generate(**prompt, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, **NEVER)
    ours = tiny.assisted(model, prompt, draft, max_new_tokens=9, **NEVER)
    assert torch.equal(ours.sequences, stock.sequences)
    inputs = longer(stock.sequences, prompt)
    expected = tiny.greedy(model, inputs, **NEVER)
    for first in (stock, ours):
        cache = cache_of(first)
        assert cache.get_seq_length() == cache_of(stock).get_seq_length()
        again = tiny.greedy(model, inputs, **{CACHE: copy.deepcopy(cache)}, **NEVER)
        assert torch.equal(again, expected)
        out = tiny.assisted(model, inputs, draft, **{CACHE: copy.deepcopy(cache)}, **NEVER)
        assert torch.equal(out.sequences, expected)


def test_a_batch_that_shrank_to_one_row_returns_no_cache():
    """Row 0 ends long before row 1: what is left in the end is one row, but the call had two."""
    model, inputs = tiny.shared("llama"), tiny.prompts((9, 9))
    text = tiny.greedy(model, inputs, **NEVER)
    end = int(next(t for t in text[0, 10:16] if t not in text[1]))
    out = tiny.assisted(model, inputs, tiny.draft_of(model, "often"), eos_token_id=end)
    assert (out.sequences[0] == end).any() and not (out.sequences[1] == end).any()
    assert cache_of(out) is None


@pytest.mark.parametrize("mask", ["xxx...", "xxxx.x..", "......"], ids=str)
def test_a_mask_that_hides_a_last_token_is_refused_by_the_row(mask):
    model, inputs = tiny.shared("llama"), masked("x" * len(mask), mask)
    with pytest.raises(ValueError, match=r"^attention_mask hides (all|the last token) of row 1:[^\n]*$"):
        tiny.assisted(model, inputs, model)


@pytest.mark.parametrize("mask", ["xxxxxx", "..xxxx", "x.x.xx", "xxxxx."])
def test_a_decoders_mask_of_an_encoder_decoder(mask):
    model, prompt = tiny.shared("t5"), masked("xxxxxxxxxx")
    decoder = torch.cat([torch.full((1, 1), tiny.PAD), torch.arange(5, 10)[None]], dim=1)
    seen = torch.tensor([[int(c == "x") for c in mask]])
    inputs = prompt | {"decoder_input_ids": decoder, "decoder_attention_mask": seen}
    if mask[-1] == ".":
        with pytest.raises(ValueError, match=r"^decoder_attention_mask hides the last token of row 0:[^\n]*$"):
            tiny.assisted(model, inputs, model)
        return
    expected = tiny.greedy(model, inputs, **NEVER)
    assert torch.equal(tiny.assisted(model, inputs, tiny.draft_of(model, "often"), **NEVER).sequences, expected)
