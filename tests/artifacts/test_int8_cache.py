"""`hla.load` and `quantization_config=Int8Config()`: what int8 makes of a model's files is used as long as they, and it, are the same."""

import json
import os
import shutil
import warnings

import pytest
import tiny_models
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts import int8_cache
from hf_lossy_assist.artifacts.identity import ModelIdentity, weights_hash
from hf_lossy_assist.models.introspection import dtype_of
from hf_lossy_assist.models.packed_linears import Int8Linear


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder of a model, and a Hub cache of its own."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return shutil.copytree(hla.demo.FOLDER / "draft", tmp_path / "mine")


@pytest.fixture
def conversions(monkeypatch):
    """The sources that were loaded to be converted."""
    found, load = [], int8_cache.load_model

    def load_model(given, **settings):
        found.extend([given] if "quantization_config" in settings else [])
        return load(given, **settings)

    monkeypatch.setattr(int8_cache, "load_model", load_model)
    return found


def logits(model):
    with torch.no_grad():
        return model(torch.arange(9, 40)[None]).logits


def find_folder(source):
    (made,) = (source.parent / "home" / "hf_lossy_assist" / "int8").glob("mine-*")
    return made


def test_the_second_load_reads_the_first_ones_files(source, conversions, capsys):
    first, shown = hla.load(source, "int8"), capsys.readouterr().err
    assert "int8: 100%" in shown and "Loading weights" in shown
    second = hla.load(str(source), dtype="int8", attn_implementation="eager")
    assert conversions == [str(source)] and second.config._attn_implementation == "eager"
    assert torch.equal(logits(hla.load(source, "int8")), logits(first))
    assert weights_hash(first) == weights_hash(second) and len(conversions) == 1
    for model in (first, second):
        assert model.config.name_or_path == f"{source}:int8" and ModelIdentity.of(model).id == "mine:int8"
        assert dtype_of(model) == "int8" and model.dtype == torch.float32 and not model.training
        assert isinstance(model.lm_head, Int8Linear) and not any(p.requires_grad for p in model.parameters())
    assert (logits(first) - logits(hla.load(source, "float32"))).abs().max() < 0.05 * logits(first).abs().max()


def change_the_weights(source, made):
    file = made / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def change_the_record(source, made):
    record = json.loads((made / "made_of.json").read_text())
    record["sha256"] = []
    (made / "made_of.json").write_text(json.dumps(record))


def change_the_source(source, made):
    file = source / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


@pytest.mark.full(every=3)
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (change_the_weights, r"model\.safetensors was changed"),
        (change_the_record, "no attribute 'items'"),
        (lambda source, made: (made / "made_of.json").write_text("{"), "is not JSON"),
        (lambda source, made: (made / "made_of.json").unlink(), r"made_of\.json is missing"),
        (lambda source, made: (made / "config.json").unlink(), r"config\.json is missing"),
        (lambda source, made: (made / "adapter_config.json").write_text("{}"), r"adapter_config\.json was changed"),
        (change_the_source, None),
    ],
)
def test_what_does_not_match_is_made_again(source, conversions, change, line):
    first = hla.load(source, "int8")
    change(source, find_folder(source))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        second = hla.load(source, "int8")
    assert [str(w.message) for w in seen] == ([] if line is None else [str(seen[0].message)])
    if line is not None:
        assert seen[0].filename == __file__
        with pytest.warns(UserWarning, match=rf"^[^\n]* cannot be used \([^\n]*{line}[^\n]*\), so it is made again$"):
            warnings.warn_explicit(seen[0].message, UserWarning, __file__, 1)
    assert torch.equal(logits(hla.load(source, "int8")), logits(first)) and torch.equal(logits(second), logits(first))
    assert len(conversions) == 2


def test_an_architecture_that_is_not_loaded_as_it_was_saved_is_made_again(source, conversions):
    shutil.rmtree(source)
    # Transformers writes and reads two of its layers as if they were other ones.
    tiny_models.tiny_model("inkling2_text", "causal", "eager").save_pretrained(source)
    first = hla.load(source, "int8")
    with pytest.warns(
        UserWarning, match=r"^[^\n]* cannot be used \([^\n]*was not loaded[^\n]*\), so it is made again$"
    ):
        second = hla.load(source, "int8")
    assert torch.equal(logits(second), logits(first)) and len(conversions) == 2


def test_a_model_that_settings_change_is_not_stored(source, conversions):
    changed = hla.load(source, "int8", rms_norm_eps=0.1)
    assert changed.config.rms_norm_eps == 0.1 and not (source.parent / "home").exists()
    whole = [hla.load(source, "int8", attn_implementation=kind) for kind in ("eager", "sdpa")]
    assert all(model.config.rms_norm_eps < 0.1 for model in whole) and len(conversions) == 2
    assert torch.equal(logits(hla.load(source, "int8", rms_norm_eps=0.1)), logits(changed))


def test_files_that_change_while_they_are_read_are_not_stored(source, conversions, monkeypatch):
    load, change = int8_cache.load_model, change_the_source

    def load_model(given, **settings):
        try:
            return load(given, **settings)
        finally:
            change(source, None)

    monkeypatch.setattr(int8_cache, "load_model", load_model)
    with pytest.warns(
        UserWarning, match=r"^the weights in int8 were not kept, [^\n]* \(model\.safetensors was changed while"
    ):
        hla.load(source, "int8")
    assert not (source.parent / "home").exists()


def test_no_file_of_before_is_read(source, conversions, monkeypatch):
    """One file before, several now: Transformers would read the one."""
    hla.load(source, "int8")
    weights = load_file(source / "model.safetensors")
    save_file({name: -x for name, x in weights.items()}, source / "model.safetensors", metadata={"format": "pt"})
    save = PreTrainedModel.save_pretrained
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda self, path: save(self, path, max_shard_size="20KB"))
    first = hla.load(source, "int8")
    assert torch.equal(logits(hla.load(source, "int8")), logits(first)) and len(conversions) == 2
    assert len(list(find_folder(source).glob("*.safetensors"))) > 1


def test_what_was_half_written_is_removed(source, conversions, monkeypatch):
    """By the process itself if it can, and else by a later one, when it is nobody's any more."""
    save, here = int8_cache.write_text, source.parent / "home" / "hf_lossy_assist" / "int8"
    for error in (OSError(28, "No space left"), SafetensorError("No space left")):
        monkeypatch.setattr(int8_cache, "write_text", lambda *given, error=error: (_ for _ in ()).throw(error))
        with pytest.warns(
            UserWarning, match=r"^the weights in int8 were not kept, [^\n]* \([^\n]*No space left[^\n]*\)$"
        ):
            first = hla.load(source, "int8")
        assert list(here.iterdir()) == []
    monkeypatch.setattr(int8_cache, "write_text", save)
    hla.load(source, "int8")
    name = find_folder(source).name
    shutil.rmtree(find_folder(source))
    for left, age in ((".old", 2 * int8_cache.ABANDONED), (".new", 0)):
        (here / f".{name}{left}").mkdir()
        os.utime(here / f".{name}{left}", (0, os.stat(here).st_mtime - age))
    assert torch.equal(logits(hla.load(source, "int8")), logits(first))
    assert sorted(path.name for path in here.iterdir()) == [f".{name}.new", name]


def test_transformers_loads_and_saves_it(source, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=hla.Int8Config())
    assert (
        model.config.name_or_path == f"{source}:int8"
        and model.config.quantization_config.quant_method == int8_cache.METHOD
    )
    model.save_pretrained(tmp_path / "saved")
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved"),
        hla.load(tmp_path / "saved"),
        hla.load(tmp_path / "saved", "int8"),
    ):
        assert torch.equal(logits(again), logits(model)) and again.config.name_or_path == f"{tmp_path / 'saved'}:int8"
    assert not (tmp_path / "home").exists(), "what is in int8 is not kept once more"
    with pytest.raises(ValueError, match=r"^int8 is for the CPU, and device_map is [^\n]*: leave it out$"):
        AutoModelForCausalLM.from_pretrained(source, quantization_config=hla.Int8Config(), device_map={"": "meta"})


def test_embeddings_that_are_the_head_stay_in_float(source):
    """The head is in int8 none the less."""
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    models = [hla.load(source, "int8") for _ in range(2)]
    assert torch.equal(*map(logits, models))
    for model in models:
        assert isinstance(model.lm_head, Int8Linear) and model.get_input_embeddings().weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "error", "line"),
    [
        (
            {"dtype": "int8", "source": "of GPTQ"},
            ValueError,
            r"^of GPTQ is quantised already: load it without int8, or name another$",
        ),
        ({"dtype": "int9"}, ValueError, r"^load: unknown dtype 'int9'; there are [^\n]* Did you mean 'int8'\?$"),
        (
            {"dtype": "int8", "device": "cuda"},
            ValueError,
            r"^load: int8 computes on the CPU alone, [^\n]*: pass device cpu$",
        ),
        ({"dtype": "int8", "source": "/not/there"}, OSError, r"^/not/there was not loaded: [^\n]*$"),
    ],
)
def test_wrong_arguments(source, monkeypatch, given, error, line):
    monkeypatch.chdir(source.parent)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    shutil.copytree(source, "of GPTQ")
    (source.parent / "of GPTQ" / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=line):
        hla.load(**{"source": source} | given)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.float16])
def test_other_precisions_are_loaded_as_they_are(source, dtype):
    model = hla.load(source, dtype)
    assert model.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float16) and not model.training


def test_a_source_of_another_kind_is_refused_in_one_line():
    for source in (3, None, object()):
        with pytest.raises(TypeError, match="^load: source: expected a folder or a Hub id, got "):
            hla.load(source)
