"""Collected sets whose token ids no vocabulary has are refused by column."""

import json

import pytest
import safetensors.torch
from datasets import load_from_disk
from support import small
from support.collecting import record, tiny_pair, word_prompts

from hf_lossy_assist.methods.eagle3 import collect as eagle3
from hf_lossy_assist.methods.eagle3.data import TextDataset
from hf_lossy_assist.methods.sprinter.collect import collect
from hf_lossy_assist.methods.sprinter.collect_runner import CollectSettings
from hf_lossy_assist.training.resumable import compute_key, write_part
from hf_lossy_assist.training.verifier_dataset import RECORD, read_dataset


PROMPTS = word_prompts(5, 6)
MOST = 10**6


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    target, draft, tokenizer = tiny_pair()
    out = tmp_path_factory.mktemp("collected") / "data"
    return collect(target, draft, tokenizer, PROMPTS, out, CollectSettings(new_tokens=3))


@pytest.mark.parametrize("value", [-1, MOST])
@pytest.mark.parametrize("column", ["token", "prompt"])
def test_a_set_for_heads(collected, tmp_path, column, value):
    changed = load_from_disk(str(collected)).map(lambda row: {column: value}, load_from_cache_file=False)
    changed.save_to_disk(str(tmp_path))
    record(tmp_path, RECORD, json.loads((collected / RECORD).read_text()))
    with pytest.raises(
        ValueError, match=rf"^[^\n]*{column} is from {value} to {value}, expected 0 to \d+: collect it again$"
    ):
        read_dataset(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ids", -1, "ids has token ids from -1 to"),
        ("ids", MOST, f"to {MOST}, and the target has 0 to"),
        ("likely", MOST, "likely has token ids"),
        ("lengths", 2, "the lengths of its texts"),
        ("prompts", MOST, "the lengths of its texts"),
    ],
)
def test_texts_for_a_drafter(tmp_path, name, value, says):
    target = small.llama(layers=4)
    settings = eagle3.TextSettings(new_tokens=4)
    prompts = [text.prompt for text in PROMPTS]
    out = eagle3.collect(target, small.tokenizer(), prompts, tmp_path / "texts", settings)
    assert len(TextDataset(out, target)) == len(PROMPTS)
    file = out / "00000.safetensors"
    tensors = safetensors.torch.load(file.read_bytes())
    tensors[name].view(-1)[0] = value
    write_part(file, safetensors.torch.save(tensors), compute_key(out / eagle3.RECORD))
    with pytest.raises(ValueError) as error:
        TextDataset(out, target)
    assert says in str(error.value) and str(error.value).startswith(str(file)) and "\n" not in str(error.value)
