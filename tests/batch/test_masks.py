"""Prompts with tokens that the mask hides: padding, holes, and caches that were filled with them. Always the text of `generate`."""

import copy
from functools import cache

import pytest
import tiny_models
import torch
from support import tiny
from support.tiny import cache_of, some_eos
from transformers import DynamicCache

from hf_lossy_assist.models.facts import CACHE
from hf_lossy_assist.models.row_model import RowModel


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


def test_a_mask_with_holes_gives_the_text_of_generate():
    """Several holes, and rows of one token; one hole is in generation/test_lossless.py."""
    model = tiny.shared("gpt2")
    for rows in (("xxx.xx.xxx", "...xxxxxxx", "..x.x...xx"), (".........x", "x........x")):
        expected = tiny.greedy(model, masked(*rows), **NEVER)
        out = tiny.assisted(model, masked(*rows), tiny.draft_of(model, "often"), **NEVER)
        assert torch.equal(out.sequences, expected)
        assert 0 < out.speculation.draft_acceptance_rate <= 1


@cache
def sees(kind):
    """Models with limited sight: in every layer, in one of two, by chunks."""
    if kind == "chunks":
        return tiny_models.tiny_model("llama4_text", "causal", "sdpa", 1).double()
    return tiny.shared(kind)


SIGHT = ("xxx.x.....xx.xxxx.xx", "...xxx.xxxxxxx...xxx", ".x.................x", "xxxxxxxxxxxxxxxxxxxx")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*own assisted loop runs:UserWarning")
@pytest.mark.parametrize("kind", ["mistral", "gemma3", "chunks", "lfm2"])
def test_holes_that_the_target_counts_are_refused(kind):
    """A window of 8 columns shows other tokens than one of 8 tokens; hidden tokens on the left shift nothing. One row runs in Transformers' loop."""
    model = sees(kind)
    says = "this call has 4: [^\n]*attention_mask hides tokens between others"
    with pytest.raises(ValueError, match=rf"^[^\n]*{says}[^\n]*$"):
        tiny.assisted(model, masked(*SIGHT), model, **NEVER)
    alone = masked(SIGHT[0])
    assert torch.equal(tiny.assisted(model, alone, model, **NEVER).sequences, tiny.greedy(model, alone, **NEVER))
    inputs = masked("xxxxxxxxxxxx", "...xxxxxxxxx")
    assert torch.equal(tiny.assisted(model, inputs, model, **NEVER).sequences, tiny.greedy(model, inputs, **NEVER))


def test_sampling_with_holes_is_that_of_the_row_without_them():
    model, seen = tiny.shared("llama"), masked("xx.x..xxxx")
    short = {"input_ids": seen["input_ids"][:, seen["attention_mask"][0].bool()]}
    texts = []
    for inputs in (seen, short):
        torch.manual_seed(0)
        out = tiny.assisted(model, inputs, tiny.draft_of(model, "often"), do_sample=True, **NEVER)
        texts.append(out.sequences[:, inputs["input_ids"].shape[1] :])
    assert torch.equal(*texts)


def full(*cases):
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


@pytest.mark.parametrize(
    ("name", "row"),
    [("llama", "..xx.xxx.xxx"), *full(*((name, "....xxxxxxxx") for name in ("gemma3", "mistral", "lfm2")))],
)
def test_a_cache_goes_on_between_this_package_and_transformers_either_way(name, row):
    """A turn here or there, then a second one here or there: four ways, one text."""
    model = tiny.shared(name)
    prompt, draft = masked(row), tiny.draft_of(model, "often")
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


BATCHES = {
    "even": ("xxxxxxxxxxxx", "xxxxxxxxxxxx", "xxxxxxxxxxxx"),
    "padded": ("xxxxxxxxxxxx", "...........x", "....xxxxxxxx"),
    "holes": ("xxx.xxxx.xxx", "...........x", "..x.xx....xx"),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "batch"),
    [("llama", "holes"), ("gemma3", "padded"), ("lfm2", "holes"),
     *full(("lfm2", "padded"), ("bare", "even"), ("gemma3", "holes"), ("gpt2", "padded"))],
)  # fmt: skip
def test_a_cache_of_several_rows(name, batch, monkeypatch):
    """A turn of Transformers', and the second one here, from the cache of the first; a model that has read all the text would not do."""
    model = tiny.shared("llama" if name == "bare" else name)
    prompt, draft = masked(*BATCHES[batch]), tiny.draft_of(model, "often")
    given = {CACHE: DynamicCache()} if name == "bare" else {}
    stock = model.generate(**prompt, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, **given, **NEVER)
    inputs = longer(stock.sequences, prompt)
    if name in ("gemma3", "lfm2") and batch == "holes":
        with pytest.raises(ValueError, match=r"attention_mask hides tokens between others"):
            tiny.assisted(model, inputs, draft, **{CACHE: copy.deepcopy(cache_of(stock))}, **NEVER)
        return
    whole = tiny.greedy(model, inputs, **NEVER)
    fed, feed = [], RowModel.feed

    def counted(row_model, tokens, counts, keep=None):
        fed.append((row_model.model is model, tokens.shape[1]))
        return feed(row_model, tokens, counts, keep)

    monkeypatch.setattr(RowModel, "feed", counted)
    for kind, gamma in (("often", 4), ("often", 12), ("never", 1)):
        end = {"eos_token_id": some_eos(whole, whole.shape[1] - tiny.NEW)} if gamma == 12 else NEVER
        cache = copy.deepcopy(cache_of(stock))
        held = cache.get_seq_length()
        assistant = tiny.draft_of(model, kind) if kind == "never" else draft
        out = tiny.assisted(model, inputs, assistant, **{CACHE: cache}, num_assistant_tokens=gamma, **end)
        assert torch.equal(out.sequences, tiny.greedy(model, inputs, **end)), gamma
        assert cache_of(out) is None and cache.get_seq_length() == held  # read and left as it was
    assert max(width for target, width in fed if target) <= 17 < whole.shape[1] - tiny.NEW


def test_rows_whose_cache_holds_nothing_of_them():
    """All that a row's cache has so far is padding."""
    model, text = tiny.shared("llama"), masked("xxxxxxxx", ".....xxx")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text["input_ids"][:, :4], attention_mask=text["attention_mask"][:, :4], **{CACHE: cache})
    expected = tiny.greedy(model, text, **NEVER)
    out = tiny.assisted(model, text, tiny.draft_of(model, "often"), **{CACHE: cache}, **NEVER)
    assert torch.equal(out.sequences, expected)


def test_a_batch_that_shrank_to_one_row_returns_no_cache():
    """Row 0 ends long before row 1: what is left in the end is one row, but the call had two."""
    model, inputs = tiny.shared("llama"), tiny.prompts((9, 9))
    text = tiny.greedy(model, inputs, **NEVER)
    end = int(next(t for t in text[0, 10:16] if t not in text[1]))
    out = tiny.assisted(model, inputs, tiny.draft_of(model, "often"), eos_token_id=end)
    assert (out.sequences[0] == end).any() and not (out.sequences[1] == end).any()
    assert cache_of(out) is None


def test_a_decoders_mask_of_an_encoder_decoder():
    model, prompt = tiny.shared("t5"), masked("xxxxxxxxxx")
    decoder = torch.cat([torch.full((1, 1), tiny.PAD), torch.arange(5, 10)[None]], dim=1)
    inputs = prompt | {"decoder_input_ids": decoder, "decoder_attention_mask": masked("x.x.xx")["attention_mask"]}
    expected = tiny.greedy(model, inputs, **NEVER)
    assert torch.equal(tiny.assisted(model, inputs, tiny.draft_of(model, "often"), **NEVER).sequences, expected)
