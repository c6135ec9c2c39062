"""Models in int8: what commands load with `--dtype int8`, and a draft's copy."""

import pytest
import torch

import hf_lossy_assist as hla
from hf_lossy_assist.cli.options import load
from hf_lossy_assist.models.identity import ModelIdentity
from hf_lossy_assist.models.int8 import int8


@pytest.fixture(scope="module")
def pair():
    return hla.demo.load()


def test_a_command_loads_both_models_in_int8_and_records_say_so(pair):
    target, draft, tokenizer = load(None, None, "int8", "cpu")
    for model, of_float in ((target, pair.target), (draft, pair.draft)):
        here, there = ModelIdentity.of(model), ModelIdentity.of(of_float)
        assert here.id == f"{there.id}:int8" and there.doubt(here) is not None
        assert not any(type(part) is torch.nn.Linear for part in model.modules())
    ids = tokenizer("Tom has 3 boxes", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        exact, rounded = pair.target(ids).logits, target(ids).logits
    assert 0 < (exact - rounded).abs().max() < 0.2 * exact.abs().max()


def test_a_copy_leaves_the_model_as_it_was(pair):
    name = pair.draft.config.name_or_path
    copy = int8(pair.draft)
    assert copy is not pair.draft and copy.config.name_or_path == f"{name}:int8"
    assert pair.draft.config.name_or_path == name
    assert any(type(part) is torch.nn.Linear for part in pair.draft.modules())
