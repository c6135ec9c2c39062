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
    "truncated": lambda data: data[: len(data) // 2],
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
    "no JSON": lambda folder: b"{",
    "an unknown type": lambda folder: changed(folder, "config.json", model_type="nothing"),
    "a size that is a text": lambda folder: changed(folder, "config.json", hidden_size="x"),
    "another size": lambda folder: changed(folder, "config.json", hidden_size=64, head_dim=16),
}
TOKENIZERS = {
    "tokenizer.json": {"a list": b"[1]", "an unknown model": b'{"version": "1.0", "model": {"type": "nothing"}}'},
    "tokenizer_config.json": {
        "lists in lists": b"[" * 100_000,
        "added tokens that are none": b'{"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"x": 1}}',
    },
}
FILES = {"model.safetensors": WEIGHTS, "config.json": CONFIGS, **TOKENIZERS}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_line(tmp_path, name):
    folder, load = draft(tmp_path), load_tokenizer if name in TOKENIZERS else load_model
    file = folder / name
    whole = file.read_bytes()
    for how, damage in FILES[name].items():
        file.write_bytes(whole)
        if not isinstance(damage, bytes):
            damage = damage(folder if name == "config.json" else whole)
        file.write_bytes(damage)
        with pytest.raises(OSError, match="was not loaded: ") as error:
            load(str(folder))
        line = str(error.value)
        assert str(folder) in line and "\n" not in line and len(line) < 1300, how


TEMPLATES = {
    "one that does not parse": "{% for", "one that raises": "{{ raise_exception('no\nsystem') }}",
    "one that looks where it may not": "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
    "one without an end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "none": None,
}  # fmt: skip


def test_a_chat_template_that_fails_is_one_line():
    tokenizer = demo.load().tokenizer
    for how, template in TEMPLATES.items():
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="chat template") as error:
            with_template(tokenizer, ["1 + 1"])
        assert "\n" not in str(error.value) and "--chat" in str(error.value), how
