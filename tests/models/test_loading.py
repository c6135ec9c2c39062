"""Damaged files of models and tokenizers: one line that names the folder, whatever Transformers stumbles over."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hf_lossy_assist import demo
from hf_lossy_assist.artifacts.loading import load_model, load_tokenizer
from hf_lossy_assist.cli._models import with_template


def draft(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo.FOLDER / "draft", tmp_path / "draft"))


def changed(folder: Path, name: str, **entries: object) -> bytes:
    return json.dumps(json.loads((folder / name).read_text()) | entries).encode()


def header(text: str) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode()


WEIGHTS = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "garbage": lambda data: b"\xff" * 1000,
    "a header that is no JSON": lambda data: header("{"),
    "a header of lists in lists": lambda data: header("[" * 100_000),
    "no tensors": lambda data: header('{"__metadata__": {"format": "pt"}}')[:-1],
    "an unknown dtype": lambda data: header('{"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 1]}}') + b"x",
}


def test_weights_that_lack_tensors_are_refused(tmp_path):
    """Transformers draws what is missing at random and says so in its log alone."""
    folder = draft(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    gone = [name for name in tensors if "layers.0.mlp" in name]
    save_file({name: tensor for name, tensor in tensors.items() if name not in gone}, file, {"format": "pt"})
    with pytest.raises(
        OSError, match=f"was not loaded: {len(gone)} of its weights are not in its files .*layers.0.mlp"
    ) as error:
        load_model(str(folder))
    assert gone and "\n" not in str(error.value)


def test_a_name_that_a_terminal_acts_on_is_shown_harmless():
    with pytest.raises(OSError, match=r"was not loaded: ") as error:
        load_model("\x1b]0;owned\x07\x1b[31mred" + "x" * 5000)
    assert "\x1b" not in str(error.value) and "\x07" not in str(error.value) and len(str(error.value)) < 1500


CONFIGS = {
    "a list": lambda folder: b"[1]",
    "no JSON": lambda folder: b"{",
    "not UTF-8": lambda folder: b'{"model_type": "\xff"}',
    "lists in lists": lambda folder: b"[" * 100_000,
    "no type": lambda folder: b"{}",
    "an unknown type": lambda folder: changed(folder, "config.json", model_type="nothing"),
    "a type that is a number": lambda folder: changed(folder, "config.json", model_type=5),
    "a size that is a text": lambda folder: changed(folder, "config.json", hidden_size="x"),
    "a size that is a list": lambda folder: changed(folder, "config.json", vocab_size=[1]),
    "no heads": lambda folder: changed(folder, "config.json", num_attention_heads=0),
    "an unknown activation": lambda folder: changed(folder, "config.json", hidden_act="nothing"),
    "layers below 0": lambda folder: changed(folder, "config.json", num_hidden_layers="two"),
    "RoPE that is none": lambda folder: changed(folder, "config.json", rope_parameters={"rope_type": "nothing"}),
    "RoPE that is a number": lambda folder: changed(folder, "config.json", rope_scaling=5, rope_parameters=5),
    "another size": lambda folder: changed(folder, "config.json", hidden_size=64, head_dim=16),
}


TOKENIZERS = {
    "tokenizer.json": {
        "empty": b"",
        "a list": b"[1]",
        "an empty object": b"{}",
        "lists in lists": b"[" * 100_000,
        "not UTF-8": b'{"version": "\xff"}',
        "an unknown model": b'{"version": "1.0", "model": {"type": "nothing"}}',
    },
    "tokenizer_config.json": {
        "no JSON": b"{",
        "a list": b"[1]",
        "lists in lists": b"[" * 100_000,
        "a token that is a number": b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": 5}',
        "a token that is a list": b'{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": [1]}',
        "a class that is a number": b'{"tokenizer_class": 5}',
        "added tokens that are none": b'{"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"x": 1}}',
    },
}


FILES = {"model.safetensors": WEIGHTS, "config.json": CONFIGS, **TOKENIZERS}


@pytest.mark.parametrize(("name", "how"), [(name, how) for name, cases in FILES.items() for how in cases])
def test_a_damaged_file_is_one_line(tmp_path, name, how):
    folder, damage = draft(tmp_path), FILES[name][how]
    file, load = folder / name, load_tokenizer if name in TOKENIZERS else load_model
    file.write_bytes(
        damage if isinstance(damage, bytes) else damage(folder if name == "config.json" else file.read_bytes())
    )
    with pytest.raises(OSError, match="was not loaded: ") as error:
        load(str(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 1300


# -- chat templates ---------------------------------------------------------------------------------------------------

TEMPLATES = {
    "one that does not parse": "{% for",
    "one that divides by zero": "{{ 1 // 0 }}",
    "one that raises": "{{ raise_exception('no\nsystem') }}",
    "one that looks where it may not": "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
    "one of undefined things": "{{ nothing.more.still }}",
    "one of wrong types": "{{ 1 + 'a' }}",
    "one without an end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "none": None,
}


@pytest.mark.full(every=3)
@pytest.mark.parametrize("how", TEMPLATES)
def test_a_chat_template_that_fails_is_one_line(how):
    tokenizer = demo.load().tokenizer
    tokenizer.chat_template = TEMPLATES[how]
    with pytest.raises(ValueError, match="chat template") as error:
        with_template(tokenizer, ["1 + 1"])
    assert "\n" not in str(error.value) and "--chat" in str(error.value)
