"""A cache passed in that was made by another model's config forgets what the target sees: refused, also while it is empty."""

import pytest
import torch
from support import small, tiny
from transformers import DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.models.compat import CACHE


def written(model, cache):
    return hla.enable(model).generate(
        **small.one(), max_new_tokens=12, do_sample=False, **{CACHE: cache}, assistant_model=model, lossy_policy="strict"
    )  # fmt: skip


def test_a_window_that_the_target_has_not_got():
    line = rf"^{CACHE} keeps 8 tokens in layer 0, where the target sees the whole text: pass DynamicCache\(config=model.config\)$"
    with pytest.raises(ValueError, match=line):
        written(small.llama(), DynamicCache(config=tiny.shared("mistral").config))
    other = tiny.build("mistral", sliding_window=12)
    with pytest.raises(ValueError, match="keeps 8 tokens in layer 0, where the target sees 12 tokens"):
        written(other, DynamicCache(config=tiny.shared("mistral").config))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_its_own_and_one_without_a_config_serve(name):
    model = tiny.shared(name)
    expected = model.generate(**small.one(), max_new_tokens=12, do_sample=False)
    for cache in (DynamicCache(config=model.config), DynamicCache()):
        assert torch.equal(written(model, cache), expected)
