"""docs/models.md says what is so: a sample of its models, each with a peculiar feature, is built and tried again; and what a model
is refused for is the model's own reason, in one line."""

import copy
import re
from functools import cache
from pathlib import Path

import pytest
import supported_models
import tiny_models
import torch
from model_table import TITLES, verdict
from transformers import DynamicCache, ImageGPTConfig, ImageGPTForCausalImageModeling

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE, CACHE_NAMES
from hf_lossy_assist.models.probe import why_not_rows


PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "models.md"
# Models with a peculiar feature each, and the first seed whose reference text varies.
SAMPLE = {
    "xglm/causal": 0,  # its attention wants a mask for each row
    "roberta/causal": 1,  # counts positions from its padding id, unless told them
    "moshi/causal": 1,  # its cache forgets what its mask shows
    "fsmt/encoder-decoder": 2,  # the tokens of a block see each other
    "prophetnet/encoder-decoder": 0,  # one token at a time alone
    "minimax/causal": 0,  # a recurrent state
    "glm_moe_dsa/causal": 0,  # a top-k by keys of an index
    "qwen3_next/causal": 0,  # a state in some layers
}


@cache
def stated():
    """The verdict of docs/models.md on each model, by "type/kind"."""
    found, section = {}, None
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = next(name for name, title in TITLES.items() if title == line[3:])
        elif section:
            names = (
                re.findall(r"`([\w+-]+)(/encoder-decoder)?`", line if line[0] != "|" else line.split(" | ")[0])
                if line
                else []
            )
            found |= {name + (kind or "/causal"): section for name, kind in names}
    return found


@pytest.mark.full
@pytest.mark.nightly(every=8)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_has_the_verdict_that_the_page_states(name):
    result = supported_models.examine(*name.split("/"), "eager", first=SAMPLE[name])
    got, why = verdict(result)
    assert got == stated()[name], why
    assert got not in ("unequal", "traceback", "not built")
    assert not why.startswith(CACHE_NAMES) and "cache_implementation" not in why, "nobody passed these"


def test_the_page_counts_what_it_lists():
    text = PAGE.read_text()
    for name, title in TITLES.items():
        listed = sum(section == name for section in stated().values())
        count = re.search(rf"\| {re.escape(title[0].lower() + title[1:])} \| (\d+) \|", text)
        assert count and int(count.group(1)) == listed
        if name in ("unequal", "traceback"):
            assert listed == 0
    built = int(re.search(r"\| built \| (\d+) \|", text).group(1))
    assert built == sum(section != "not built" for section in stated().values()) >= 120


def test_a_model_whose_settings_switch_its_cache_off_is_decoded_with_ours():
    model = tiny_models.tiny_model("mpt", "causal", "eager")
    assert model.generation_config.use_cache is False
    given = supported_models.prompts((5, 3), 0) | {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**given)
    given |= {"assistant_model": copy.deepcopy(model), "lossy_policy": "strict"}
    assert torch.equal(hla.enable(model).generate(**given), expected)


def test_a_model_is_tried_once_and_in_eval_mode():
    model = tiny_models.tiny_model("opt", "causal", "eager").train()
    frozen = model.get_decoder().layers[0].eval()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(module.get_decoder().layers[1].training))
    assert why_not_rows(model) is None
    assert 0 < len(seen) < 20 and not any(seen)
    assert model.training and not frozen.training
    tried = len(seen)
    assert why_not_rows(model) is None and len(seen) == tried


def test_a_vocabulary_is_what_the_output_layer_writes():
    """ImageGPT reads one id more, which processors that are given the size of the vocabulary must not be told of."""
    torch.manual_seed(0)
    model = ImageGPTForCausalImageModeling(
        ImageGPTConfig(vocab_size=98, n_embd=32, n_layer=2, n_head=4, n_positions=256)
    )
    tiny_models.lively(model.eval(), 2)
    inputs = {
        "input_ids": torch.tensor([[97, 3, 4, 5, 6]]), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0,
    }  # fmt: skip
    inputs |= {"eos_token_id": None, "bad_words_ids": [[5], [7, 8]], "repetition_penalty": 1.2}
    expected = model.generate(**inputs)
    with pytest.warns(UserWarning, match="Transformers' own assisted loop runs the policy"):
        ours = hla.enable(model).generate(**inputs, assistant_model=copy.deepcopy(model), lossy_policy="strict")
    assert torch.equal(expected, ours) and len(set(expected[0].tolist())) > 8


def test_one_row_with_padding_or_with_a_cache_is_generates_text():
    """RoBERTa's positions, left to themselves, begin to count behind its padding id."""
    model = tiny_models.tiny_model("roberta", "causal", "eager", 0)
    padded = {name: value[:1] for name, value in supported_models.prompts((5, 9), 0).items()}
    alone, texts = supported_models.split_rows(padded)[0], []
    for inputs, with_cache in ((padded, False), (alone, False), (alone, True)):
        calls = [{CACHE: DynamicCache(config=model.config)} if with_cache else {} for _ in range(2)]
        expected = model.generate(**inputs, **supported_models.SETTINGS, **calls[0]).sequences
        draft = copy.deepcopy(model)
        hla.enable(model)
        ours = model.generate(
            **inputs, **supported_models.SETTINGS, **calls[1], assistant_model=draft, lossy_policy="strict"
        ).sequences
        hla.disable(model)
        assert torch.equal(expected, ours)
        texts.append(expected[0, -supported_models.NEW :].tolist())
    assert len(set(texts[0])) > 6 and texts[0] == texts[1]
