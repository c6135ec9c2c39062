"""Tokens hidden in the middle of a row, before targets with windows or chunks: on caches that are passed in, and behind pictures.

Windows and chunks count the hidden columns, which a cache of rows does not hold.
"""

import pytest
import tiny_vision
import torch
from support import hybrids, seeing
from transformers import DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.models.compat import CACHE


def turns(seed, rows):
    """A second turn behind a first, in which row 0 ended two tokens early."""
    ids = torch.randint(4, 89, (rows, 20), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, 15:17] = 0
    return ids, mask


def first_turn(model, ids, mask, length=17):
    """Transformers' cache of the first `length` columns."""
    cache, places = DynamicCache(config=model.config), (mask[:, :length].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids[:, :length], attention_mask=mask[:, :length], position_ids=places, use_cache=True, **{CACHE: cache})
    return cache


@pytest.mark.full(every=8)
@pytest.mark.nightly(every=4)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "kind", ["llama4_text", "gemma3_text", "gpt_oss"]
)  # those that could see, and one that reads text alone
def test_a_cache_is_gone_on_with_over_hidden_tokens(kind, rows):
    model = hla.enable(hybrids.model(kind))
    draft = hybrids.drafts(model)["often"]
    for seed in range(4):
        ids, mask = turns(seed, rows)
        settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        alone = model.generate(ids, **settings)
        given = {"assistant_model": draft, "lossy_policy": "strict"}
        assert model.generate(ids, **settings, **given).equal(alone)
        assert model.generate(ids, **settings, **given, **{CACHE: first_turn(model, ids, mask)}).equal(alone)


def pictured(kind, hidden, seed):
    """A picture in row 0 alone, and behind it a second turn, of which `hidden` tokens of row 0 are hidden."""
    first = tiny_vision.prompts(tiny_vision.SEEN[kind], [1, 0], seed)
    new = torch.randint(4, 80, (2, 6 + hidden), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(new)
    mask[0, 1 : 1 + hidden] = 0
    behind = {"input_ids": new, "attention_mask": mask}
    behind |= {name: torch.zeros_like(new) for name in first if name.endswith("token_type_ids")}
    return {name: torch.cat([tensor, behind[name]], 1) if name in behind else tensor for name, tensor in first.items()}


@pytest.mark.full(every=8)
@pytest.mark.nightly(every=4)
@pytest.mark.parametrize("order", [(0, 5, 5), (5, 0, 2)], ids=["whole first", "hidden first"])
@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "mistral3"])
def test_hidden_tokens_behind_pictures(kind, order):
    """Whatever was asked first: what one prompt's trial said is not said of the other kind."""
    seeing.model_of.cache_clear()
    seeing.draft_of.cache_clear()
    for seed, hidden in enumerate(order):
        given = pictured(kind, hidden, seed)
        expected = seeing.written(kind, given).sequences
        assert seeing.assisted(kind, given, assistant_model=seeing.draft_of(kind)).sequences.equal(expected)


def test_first_layers_behind_pictures_and_hidden_tokens():
    """They draft on the target's own cache, and see what it sees."""
    for seed, hidden in enumerate((0, 5, 2)):
        given = pictured("gemma3", hidden, seed)
        draft = hla.early_exit(seeing.model_of("gemma3"), 1)
        assert seeing.assisted("gemma3", given, assistant_model=draft).sequences.equal(
            seeing.written("gemma3", given).sequences
        )


def test_first_layers_of_a_model_with_embeddings_for_each_layer():
    with pytest.raises(
        ValueError, match=r"for all of its layers side by side \(embed_tokens_per_layer\), which its first layers"
    ):
        hla.early_exit(seeing.model_of("gemma4"), 1)
