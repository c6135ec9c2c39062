"""Models in int8: what commands load with `--dtype int8`, the texts of blocks and of single tokens, and a draft's copy."""

import copy
import json
import math
import shutil
import warnings

import pytest
import torch
from support.refusals import refused
from transformers import AutoModelForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.identity import ModelIdentity, weights_hash
from hf_lossy_assist.cli._models import load_models
from hf_lossy_assist.cli._options import LoadOptions, ModelOptions
from hf_lossy_assist.models.introspection import dtype_of
from hf_lossy_assist.models.packed_linears import Int8Linear, int8, quantised


@pytest.fixture(scope="module")
def pair():
    return hla.demo.load()


def test_a_command_loads_both_models_in_int8_and_records_say_so(pair):
    target, draft, tokenizer = load_models(ModelOptions(), LoadOptions(dtype="int8", device="cpu"))
    for model, of_float in ((target, pair.target), (draft, pair.draft)):
        here, there = ModelIdentity.of(model), ModelIdentity.of(of_float)
        assert here.id == f"{there.id}:int8" and there.doubt(here) is not None
        assert (dtype_of(model), dtype_of(of_float)) == ("int8", "float32")
        assert not any(type(part) is torch.nn.Linear for part in model.modules())
    ids = tokenizer("Tom has 3 boxes", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        exact, rounded = pair.target(ids).logits, target(ids).logits
    assert 0 < (exact - rounded).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(("inputs", "outputs"), [(17, 33), (1536, 101)])
def test_a_token_is_the_same_in_a_block_of_any_width(pair, inputs, outputs):
    """To the bit, whatever the others are: a first token a thousand times larger, as many models have, or another prompt's row."""
    linear, generator = torch.nn.Linear(inputs, outputs), torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(linear)
    model.config = copy.deepcopy(pair.draft.config)
    x = torch.randn(1, 40, inputs, generator=generator)
    x[0, 0] *= 1000
    weight = linear.weight.detach().clone()
    steps = weight.abs().amax(dim=1, keepdim=True) / 127
    exact = torch.nn.functional.linear(x, (weight / steps).round() * steps, linear.bias)
    out = quantised(model)(x)
    assert (out - exact)[0, 1:].abs().max() < 2e-3 * exact[0, 1:].abs().max()  # only the weights have eight bits
    single = torch.cat([model(x[:, place : place + 1]) for place in range(40)], dim=1)
    assert all(model(x[:, first:end]).equal(single[:, first:end]) for first in (0, 3) for end in (*range(4, 13), 40))
    assert model(x.expand(3, -1, -1))[1:2].equal(out)
    assert model(x * 0).equal(linear.bias.expand_as(out)) and model(x * math.nan).isnan().all()


@pytest.mark.parametrize(
    ("count", "batch_size"),
    [pytest.param(6, 6, marks=pytest.mark.full), pytest.param(64, 8, marks=pytest.mark.nightly)],
)
def test_blocks_write_what_single_tokens_do(pair, count, batch_size):
    """Attention computes a little differently in a block, in int8 as in float32: 95 % of the texts, up to 64 tokens."""
    target, draft = int8(pair.target), int8(pair.draft)
    prompts, equal = [problem.prompt for problem in hla.demo.problems(count, seed=3)], 0
    for start in range(0, count, batch_size):
        inputs = pair.tokenizer(prompts[start : start + batch_size], return_tensors="pt", padding=True)
        settings = {"max_new_tokens": 64, "do_sample": False}
        alone = hla.disable(target).generate(**inputs, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            blocks = hla.enable(target).generate(**inputs, **settings, assistant_model=draft, lossy_policy="strict")
        equal += sum(torch.equal(one, other) for one, other in zip(alone, blocks, strict=True))
    assert equal >= 0.95 * count


def test_no_call_computes_the_weights_from_their_whole_numbers(pair, monkeypatch):
    """A large head's take seconds, more than a whole text."""

    def read(layer):
        raise AssertionError(f"a layer of {layer.out_features} outputs was asked for its weights")

    target, draft = int8(pair.target), int8(pair.draft)
    inputs = {"input_ids": torch.arange(12).reshape(2, 6), "max_new_tokens": 8, "do_sample": False}
    monkeypatch.setattr(Int8Linear, "weight", property(read))
    out = hla.enable(target).generate(**inputs, assistant_model=draft, lossy_policy="svip+fallback")
    assert torch.equal(out, type(target).generate(target, **inputs))


def test_a_copy_leaves_the_model_as_it_was_and_is_made_once(pair):
    """`--dtype int8 --companion int8`: the companion would be the draft once more."""
    name, copied = pair.draft.config.name_or_path, int8(pair.draft)
    assert copied is not pair.draft and copied.config.name_or_path == f"{name}:int8"
    assert pair.draft.config.name_or_path == name
    assert any(type(part) is torch.nn.Linear for part in pair.draft.modules())
    refused(lambda: int8(copied), "demo-draft:int8 is quantised already")
    early = hla.early_exit(int8(pair.target), 1)
    assert dtype_of(early) == "int8" and dtype_of(hla.early_exit(pair.target, 1)) == "float32"
    refused(lambda: int8(early), "is quantised already")


def test_a_packed_model_has_no_weights_to_round(pair):
    with pytest.raises(ValueError, match=r"^demo-draft has lost its weights to prepack\(…\): [^\n]*$"):
        int8(hla.prepack(copy.deepcopy(pair.draft)))


def test_other_weights_in_int8_have_another_hash(pair):
    """A certificate of the one says nothing about the other; doubled, the whole numbers are the same and their scale is not."""
    found = {weights_hash(int8(pair.draft)), weights_hash(int8(pair.draft))}
    for factor in (-1.0, 2.0):
        other = copy.deepcopy(pair.draft)
        with torch.no_grad():
            other.model.layers[0].mlp.up_proj.weight.mul_(factor)
        found.add(weights_hash(int8(other)))
    assert len(found) == 3


def test_a_draft_in_bfloat16_has_a_copy_in_int8_that_autocast_may_run(pair):
    model = int8(copy.deepcopy(pair.draft).to(torch.bfloat16))
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits
    assert logits.dtype == torch.float32 and logits.isfinite().all()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert (model(torch.tensor([[5, 6, 7]])).logits - logits).abs().max() < 0.05 * logits.abs().max()


@pytest.fixture
def source(tmp_path):
    """A folder of a model."""
    return shutil.copytree(hla.demo.FOLDER / "draft", tmp_path / "mine")


def logits(model):
    with torch.no_grad():
        return model(torch.arange(9, 40)[None]).logits


def test_a_folder_is_loaded_in_int8_and_what_is_saved_is_not_converted_again(source, tmp_path):
    model = hla.load(source, "int8")
    assert model.config.name_or_path == f"{source}:int8" and ModelIdentity.of(model).id == "mine:int8"
    assert dtype_of(model) == "int8" and model.dtype == torch.float32 and not model.training
    assert isinstance(model.lm_head, Int8Linear) and not any(p.requires_grad for p in model.parameters())
    assert (logits(model) - logits(hla.load(source, "float32"))).abs().max() < 0.05 * logits(model).abs().max()
    model.save_pretrained(tmp_path / "saved")
    for again in (
        AutoModelForCausalLM.from_pretrained(source, quantization_config=hla.Int8Config()),
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved"),
        hla.load(tmp_path / "saved"),
        hla.load(tmp_path / "saved", "int8"),
    ):
        assert torch.equal(logits(again), logits(model)) and again.config.name_or_path.endswith(":int8")
    with pytest.raises(ValueError, match=r"^int8 is for the CPU, and device_map is [^\n]*: leave it out$"):
        AutoModelForCausalLM.from_pretrained(source, quantization_config=hla.Int8Config(), device_map={"": "meta"})


def test_embeddings_that_are_the_head_stay_in_float(source):
    """The head is in int8 none the less."""
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    model = hla.load(source, "int8")
    assert isinstance(model.lm_head, Int8Linear) and model.get_input_embeddings().weight.dtype == torch.float32


def test_what_cannot_be_loaded_is_one_line(source):
    for given, error, line in (
        ({"dtype": "int9"}, ValueError, r"^load: unknown dtype 'int9'\. Did you mean 'int8'\?$"),
        ({"device": "meta"}, ValueError, r"^load: device 'meta' cannot be used here: [^\n]*$"),
        ({"dtype": "int8", "source": "/not/there"}, OSError, r"^/not/there was not loaded: [^\n]*$"),
    ):
        with pytest.raises(error, match=line):
            hla.load(**{"source": source} | given)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (source / "config.json").write_text(json.dumps(config))
    refused(lambda: hla.load(source, "int8"), " quantized [^\n]*$", OSError)
