"""Masks that hide a row's last token: its rows are read as if they were padded on the left. Transformers' `generate` goes on from the padding there."""

import pytest
import torch
from support import hybrids, seeing, tiny
from transformers import BloomConfig, BloomForCausalLM, DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


LENGTHS = (9, 1, 4)
GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": tiny.NEVER_EMITTED}


def padded(lengths=LENGTHS, seed=0):
    """The same prompts with padding on the left and on the right."""
    left = tiny.prompts(lengths, seed)
    width = max(lengths)
    turn = torch.stack([torch.arange(width).roll(n - width) for n in lengths])  # the texts first
    return left, {name: value.gather(1, turn) for name, value in left.items()}


def assisted(model, given, **settings):
    settings = {"assistant_model": model, "lossy_policy": "strict"} | GREEDY | settings
    return hla.enable(model).generate(**given, **settings)


def bloom():
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=None)
    model = BloomForCausalLM(config).eval()  # in float64 Transformers gives NaN for padded rows
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
    return model


MODELS = {"bloom": bloom, "falcon_h1": lambda: hybrids.model("falcon_h1")}


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_read_by_the_mask(name):
    """Positions that are no argument, and states; the others are in test_lossless.py."""
    model, (left, right) = MODELS[name](), padded()
    expected = model.generate(**left, **GREEDY)[:, 9:]
    for _ in range(2):
        out = assisted(model, right)
        assert torch.equal(out[:, 9:], expected) and torch.equal(out[:, :9], right["input_ids"])
        right["inputs"] = right.pop("input_ids") if "input_ids" in right else right["inputs"]
        right |= {"input_ids": right.pop("inputs")}


def test_a_mask_that_padding_implies():
    """`generate` makes one where none is passed and the padding is no end token."""
    model, (left, right) = tiny.shared("llama"), padded((9, 3, 4))
    expected = model.generate(**left, **GREEDY)[:, 9:]
    assert torch.equal(assisted(model, {"input_ids": right["input_ids"]})[:, 9:], expected)


def test_holes_stay_holes_and_a_draft_of_another_kind():
    model = tiny.shared("llama")
    left, right = padded()
    for inputs in (left, right):
        inputs["attention_mask"] = inputs["attention_mask"].clone()
    left["attention_mask"][0, 4], right["attention_mask"][0, 4] = 0, 0
    expected = model.generate(**left, **GREEDY)[:, 9:]
    for way in ({"assistant_model": tiny.shared("gpt2")}, {"assistant_model": None, "prompt_lookup_num_tokens": 3}):
        assert torch.equal(assisted(model, right, **way)[:, 9:], expected)


@pytest.mark.filterwarnings("ignore:Passing .repetition_penalty. with .inputs_embeds.:UserWarning")
def test_a_penalty_passes_over_the_padding():
    """It is often the end token, and a penalty on it would make texts longer."""
    model, (left, right) = tiny.shared("qwen3"), padded()
    settings = {"repetition_penalty": 1.8, "sequence_bias": {(0,): 4.0}}  # it likes the padding

    def embedded(inputs):
        table = model.get_input_embeddings()
        return {"inputs_embeds": table(inputs["input_ids"]).detach(), "attention_mask": inputs["attention_mask"]}

    for form in (dict, embedded):
        expected = model.generate(**form(left), **GREEDY, **settings)[:, -20:]
        assert torch.equal(assisted(model, form(right), **settings)[:, -20:], expected)


def test_a_text_goes_on_from_the_cache_that_comes_back():
    """Whose places are those of the caller's mask; hidden tokens then lie in the middle."""
    model = hla.enable(tiny.build("llama"))
    ids, mask = torch.arange(4, 13)[None], torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0]])
    whole = model.generate(ids[:, :7], **GREEDY)
    first = assisted(model, {"input_ids": ids, "attention_mask": mask}, max_new_tokens=6, return_dict_in_generate=True)
    assert torch.equal(first.sequences[:, 9:], whole[:, 7:13])
    longer = torch.cat([mask, torch.ones(1, 6, dtype=torch.int64)], 1)
    again = {"input_ids": first.sequences, "attention_mask": longer, CACHE: first[CACHE]}
    assert torch.equal(assisted(model, again, max_new_tokens=14)[:, 15:], whole[:, 13:])
    assert torch.equal(model.generate(**again, **GREEDY | {"max_new_tokens": 14})[:, 15:], whole[:, 13:])


def test_beside_a_cache_the_last_tokens_of_a_row_may_be_hidden():
    model, (left, right) = hla.enable(tiny.build("llama")), padded()
    expected = model.generate(**left, **GREEDY)[:, 9:]
    cache = DynamicCache()
    with torch.no_grad():
        model(right["input_ids"][:, :1], **{CACHE: cache})
    assert torch.equal(assisted(model, right | {CACHE: cache})[:, 9:], expected)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_pictures_in_a_batch_padded_on_the_right(name):
    left = seeing.prompts_of(name, [1, 0])
    pad, text = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[11, 47, 62]])  # makes rows of one length ragged

    def longer(rows, side, behind_first=pad):
        second = [pad, rows[1:]] if side == "left" else [rows[1:], pad]
        return torch.cat([torch.cat([rows[:1], behind_first], 1), torch.cat(second, 1)])

    out = {}
    for side in ("left", "right"):
        out[side] = left | {key: longer(left[key], side) for key in left if key.endswith("token_type_ids")}
        out[side] |= {"input_ids": longer(left["input_ids"], side, text)}
        out[side] |= {"attention_mask": longer(left["attention_mask"], side, torch.ones_like(text))}
    expected = seeing.written(name, out["left"]).sequences
    width = expected.shape[1] - seeing.NEW
    got = seeing.assisted(name, out["right"], assistant_model=seeing.draft_of(name)).sequences
    assert torch.equal(got[:, width:], expected[:, width:])


def test_a_decoder_without_rows_reads_a_hidden_last_token_as_generate_does():
    model = tiny.shared("t5")
    ids, begin = torch.arange(4, 13)[None], torch.tensor([[0, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 0]])
    given = {"input_ids": ids, "decoder_input_ids": begin, "decoder_attention_mask": mask}
    assert torch.equal(assisted(model, given), model.generate(**given, **GREEDY))
