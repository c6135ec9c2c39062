"""Models that see: the prompt is read once, with its pictures, as `generate` has it read; then rounds are text, or the model is refused by name."""

import re
from functools import wraps
from pathlib import Path

import pytest
import torch
from support import eagle
from support.refusals import refused
from support.seeing import SETTINGS, assisted, draft_of, model_of, prompts_of, reads_images, written
from support.small import llama, near, one, ragged, tokenizer
from support.tiny import cache_of
from tiny_models import lively, tiny_config, tiny_model, untie
from tiny_vision import END, IMAGE, SEEN, START, VIDEO
from transformers import AutoModelForImageTextToText, DynamicCache, VoxtralForConditionalGeneration

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.trained import Eagle3Drafter
from hf_lossy_assist.models.facts import CACHE


FAMILIES = (
    "llava", "llava_next", "gemma3", "paligemma", "mistral3", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v",
    "internvl",
)  # fmt: skip


QUICK, NIGHTLY = ("qwen2_5_vl", "gemma3"), ("llava_next", "paligemma", "idefics3", "qwen2_vl", "glm4v", "internvl")
SLOW = {name: pytest.mark.nightly if name in NIGHTLY else pytest.mark.full for name in FAMILIES if name not in QUICK}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=mark) for name, mark in SLOW.items())])
def test_the_text_behind_pictures_is_the_one_that_generate_writes(name):
    """One picture; two in one row and none in the other; text alone; a draft that sees them."""
    assert reads_images(name, prompts_of(name, (1,)))
    for counts in ((1,), (1, 2, 0), (0,), (0, 0, 0)):
        inputs = prompts_of(name, counts)
        out = assisted(name, inputs, assistant_model=draft_of(name), num_assistant_tokens=4)
        assert torch.equal(out.sequences, written(name, inputs).sequences), counts
        assert out.speculation.draft_acceptance_rate > 0


DRAFTS = {
    "a model of text": lambda name: {"assistant_model": llama(seed=1).float()},
    "its first layers": lambda name: {"assistant_model": hla.early_exit(model_of(name), 1)},
    "prompt lookup": lambda name: {"prompt_lookup_num_tokens": 4},
    "suffixes": lambda name: {"drafter": hla.SuffixDrafter()},
    "EAGLE-3": lambda name: {"drafter": Eagle3Drafter(eagle.network(model_of(name)))},
    "a companion that sees": lambda name: {
        "assistant_model": llama(seed=1).float(),
        "lossy_policy": hla.LossyPolicy(stop=hla.Confidence(0.1), filter=hla.Staged(draft_of(name))),
    },  # fmt: skip
    "SVIP": lambda name: {"assistant_model": draft_of(name), "lossy_policy": "svip"},
    "compiled rounds": lambda name: {"assistant_model": draft_of(name), "cache_implementation": "static"},
}


@pytest.mark.full
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=list(DRAFTS))
@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_whatever_drafts(name, drafts):
    for counts in ((1,), (1, 2, 0)):
        inputs, given = prompts_of(name, counts), drafts(name)
        stock = {"cache_implementation": None}
        assert torch.equal(assisted(name, inputs, **given).sequences, written(name, inputs, **stock).sequences), counts


def test_a_draft_that_sees_reads_the_callers_pictures_and_not_what_the_target_made_of_them():
    inputs = prompts_of("qwen2_5_vl", (1, 2))
    for draft, least, most in ((model_of("qwen2_5_vl"), 1.0, 1.0), (llama(seed=1).float(), 0.0, 0.5)):
        assert least <= assisted("qwen2_5_vl", inputs, assistant_model=draft).speculation.draft_acceptance_rate <= most


def test_a_drafter_on_the_targets_states_sees_each_rows_states(monkeypatch):
    """The prompts are padded on the left there: what it drafts for a row of text is what it drafts for that row alone."""
    name, seen = "qwen2_5_vl", eagle.watched(monkeypatch)
    inputs = prompts_of(name, (2, 0))
    drafter = Eagle3Drafter(eagle.network(model_of(name)))
    assisted(name, inputs, drafter=drafter, num_assistant_tokens=3)
    beside = {tuple(text.tolist()): tokens for text, tokens in eagle.drafts(seen)}
    seen.clear()
    alone = {"input_ids": inputs["input_ids"][1:, inputs["attention_mask"][1].bool()]}
    assisted(name, alone, drafter=drafter, num_assistant_tokens=3)
    both = [(beside[key], tokens) for text, tokens in eagle.drafts(seen) if (key := tuple(text.tolist())) in beside]
    assert len(both) > 3
    first = min(len(key) for key in beside if key[0] == alone["input_ids"][0, 0])
    assert first == alone["input_ids"].shape[1], "it has seen the whole prompt by the first round"
    for tokens, others in both:
        assert tokens[: len(others)] == others[: len(tokens)]


def turns(name, callers_cache, **given):
    """Three turns of a chat on one cache: the output's, or the caller's own."""
    seen, inputs, texts = SEEN[name], prompts_of(name, (1,)), []
    types = inputs.get(seen.types)
    if callers_cache:
        inputs[CACHE] = DynamicCache(config=model_of(name).config.get_text_config(decoder=True))
    for turn in range(3):
        out = model_of(name).generate(**inputs, **(SETTINGS | {"max_new_tokens": 5}), **given)
        texts.append(out.sequences)
        new = torch.tensor([[5 + turn, 6, 7, 8]])
        ids = torch.cat([out.sequences, new], dim=1)
        inputs = {"input_ids": ids, CACHE: inputs[CACHE] if callers_cache else cache_of(out)}
        if types is not None:
            types = torch.nn.functional.pad(types, (0, out.sequences.shape[1] - types.shape[1]))
            types = torch.cat([types, (new == IMAGE).long()], dim=1)
            inputs[seen.types] = types
    return texts


@pytest.mark.full
@pytest.mark.parametrize("chat", [("qwen2_5_vl", False), ("qwen3_5", False), ("qwen2_5_vl", True)], ids=str)
def test_a_chat_goes_on_behind_pictures(chat):
    """Positions lag; there are states, too; the caller's cache."""
    wanted = turns(*chat)
    for draft in (draft_of(chat[0]), llama(seed=1).float()):
        got = turns(*chat, assistant_model=draft, lossy_policy="strict")
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_stop_strings_lengths_and_scores():
    name, draft = "qwen3_vl", draft_of("qwen3_vl")
    inputs = prompts_of(name, (1, 2, 0))
    wanted = written(name, inputs, output_logits=True)
    stop = {"stop_strings": [tokenizer().decode(wanted.sequences[0, -5])], "tokenizer": tokenizer()}
    out = assisted(name, inputs, assistant_model=draft, **stop)
    assert torch.equal(out.sequences, written(name, inputs, **stop).sequences)
    assert out.sequences.ne(wanted.sequences[:, : out.sequences.shape[1]]).any()

    # A picture counts as the tokens that it takes in the text, as `generate` counts.
    short = {"max_new_tokens": None, "max_length": inputs["input_ids"].shape[1] + 7}
    out = assisted(name, inputs, assistant_model=draft, **short)
    assert torch.equal(out.sequences, written(name, inputs, **short).sequences)
    assert out.speculation.num_new_tokens == 3 * 7

    out = assisted(name, inputs, assistant_model=draft, output_logits=True)
    for ours, expected in zip(out.logits, wanted.logits, strict=True):
        assert torch.allclose(ours, expected, atol=1e-3)


def test_custom_generate_hands_a_draft_no_pictures():
    name, inputs = "llava", prompts_of("llava", (1, 0))
    wanted = written(name, inputs).sequences
    text = hla.Runner("strict", llama(seed=1).float())
    assert torch.equal(model_of(name).generate(**inputs, **SETTINGS, custom_generate=text).sequences, wanted)
    sees = hla.Runner("strict", draft_of(name))
    line = "drafts from the same images, which custom_generate is not handed: pass lossy"
    with pytest.raises(ValueError, match=line):
        model_of(name).generate(**inputs, **SETTINGS, custom_generate=sees)


def many_with_pictures():
    pictures = {"pixel_values": torch.zeros(1, 3, 16, 16)}
    return hla.generate_many(model_of("llava"), [[5, 6]], assistant_model=llama(), **pictures)


def another_picture():
    inputs = prompts_of("gemma3", (1,))
    out = written("gemma3", inputs)
    twice = {n: torch.cat([inputs[n], inputs[n]], dim=1) for n in inputs.keys() & {SEEN["gemma3"].types}}
    twice["input_ids"] = torch.cat([out.sequences, inputs["input_ids"]], dim=1)
    twice = {n: torch.nn.functional.pad(v, (twice["input_ids"].shape[1] - v.shape[1], 0)) for n, v in twice.items()}
    return twice | {"pixel_values": inputs["pixel_values"], CACHE: cache_of(out)}


def ends_with_a_picture():
    inputs = prompts_of("llava", (1,))
    end = int((inputs["input_ids"][0] == inputs["input_ids"].max()).nonzero()[-1]) + 1
    return inputs | {n: inputs[n][:, :end] for n in ("input_ids", "attention_mask")}


def test_what_cannot_be_right_is_refused_in_one_line():
    refused(many_with_pictures, "^generate_many takes text prompts only, got pixel_values: call generate")
    other = "the draft SmolVLMForConditionalGeneration cannot be given what the target is given .*: pass a draft of"
    again = f"{CACHE} goes on with text alone, and images or sounds were passed: leave {CACHE} out"
    end = "row 0 ends with a piece of an image, and a prompt must end with text: put a token behind it"
    for name, inputs, draft, line in (
        ("llava", prompts_of("llava", (1,)), draft_of("smolvlm"), other),
        ("gemma3", another_picture(), llama().float(), again), ("llava", ends_with_a_picture(), llama().float(), end),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=rf"^[^\n]*{line}[^\n]*$"):
            assisted(name, inputs, assistant_model=draft)


def test_a_video_beside_a_picture():
    """A row with a video of two frames, a row with a picture, and a row of text: positions lag by other numbers."""
    name = "qwen2_5_vl"
    inputs, pieces = prompts_of(name, (1, 0)), [START, *[VIDEO] * 12, END]
    clip = torch.tensor([[5, 6, *pieces, 7, 8, 9]])
    more = clip.shape[1] - inputs["input_ids"].shape[1]
    for each in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[each] = torch.nn.functional.pad(inputs[each], (more, 0))
    video = {"pixel_values_videos": torch.randn(48, 96), "video_grid_thw": torch.tensor([[2, 4, 6]])}
    inputs["input_ids"] = torch.cat([inputs["input_ids"], clip])
    inputs["attention_mask"] = torch.cat([inputs["attention_mask"], clip.ne(0).long()])
    inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], 2 * (clip == VIDEO).long()])
    inputs |= video
    out = assisted(name, inputs, assistant_model=draft_of(name))
    assert torch.equal(out.sequences, written(name, inputs).sequences)
    assert out.speculation.draft_acceptance_rate > 0
    other = inputs | {"pixel_values_videos": -video["pixel_values_videos"]}
    assert not torch.equal(written(name, other).sequences, out.sequences)


def test_a_model_that_looks_at_its_picture_again_is_refused_after_a_trial(monkeypatch):
    """Its text alone goes on in blocks; behind a picture a block's logits are others than those of one token at a time."""
    model = hla.enable(tiny_model("llava", "image-text", "sdpa", 0, **SEEN["llava"].changes))
    forward, looked = model.forward, []

    @wraps(forward)
    def again(*args, **kwargs):
        out = forward(*args, **kwargs)
        looked.append(bool((kwargs.get("mm_encoder_outputs") or {}).get("image")))
        if any(looked) and not looked[-1] and kwargs["input_ids"].shape[1] > 1:
            out.logits = out.logits.flip(-1)
        return out

    monkeypatch.setattr(model, "forward", again)
    given = SETTINGS | {"assistant_model": llama(seed=1).float(), "lossy_policy": "strict"}
    line = "LlavaForConditionalGeneration cannot go on in blocks from this prompt (a trial on a block did not give what it gives one token at a time"
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(line)):
            model.generate(**prompts_of("llava", (1,)), **given)


def test_the_page_says_what_is_so():
    page = (Path(__file__).parents[2] / "docs" / "vision_models.md").read_text()
    for name in FAMILIES:
        assert re.search(rf"^\| [^|]*`{name}` [^|]*\| equal \| equal \|", page, re.MULTILINE), name
    assert "| unequal |" not in page


# -- models whose pictures are no tokens of the text, and one whose are ----------------------------------------------------


GIVEN = {"assistant_model": llama(seed=1).float(), "lossy_policy": "strict"}


def built(name, **changes):
    """Without the weights that make its text vary: these models do not read text alone."""
    config = tiny_config(name, **changes)
    untie(config)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.generation_config.pad_token_id = 0
    return hla.enable(model)


def prompt(*ids, **pictures):
    ids = torch.tensor([ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | pictures


PICTURE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.full
@pytest.mark.parametrize("way", [{}, {"assistant_model": None, "prompt_lookup_num_tokens": 3}])
def test_a_model_whose_generate_hands_embeddings_to_its_language_model(way):
    """BLIP-2."""
    model = built("blip-2", image_token_index=IMAGE, num_query_tokens=4, text_config={"ffn_dim": 64})
    ids = torch.tensor([[IMAGE] * 4 + [5, 6, 7], [IMAGE] * 4 + [9, 4, 30]])
    for rows in (1, 2):
        inputs = prompt(*ids[0].tolist()) | {"input_ids": ids[:rows], "attention_mask": torch.ones_like(ids[:rows])}
        inputs["pixel_values"] = torch.cat([PICTURE, -PICTURE])[:rows]
        expected = model.generate(**inputs, **SETTINGS).sequences
        out = model.generate(**inputs, **SETTINGS | GIVEN | way)
        assert torch.equal(out.sequences, expected) and out.speculation.num_draft_tokens > 0


def test_pictures_that_a_round_cannot_go_on_behind_are_refused():
    several = {"pixel_values": PICTURE[None], "image_attention_mask": torch.ones(1, 4, 1, dtype=torch.int64)}
    counted = "GitForCausalLM keeps 9 places in its cache for a prompt of 4 tokens, and a round can only go on from a"
    tried = "IdeficsForVisionText2Text cannot go on in blocks from this prompt .a trial on its prompt failed"
    for name, pictures, line in (("git", {"pixel_values": PICTURE}, counted), ("idefics", several, tried)):
        with pytest.raises(ValueError, match=rf"^{line}[^\n]*$"):
            built(name).generate(**prompt(5, 6, 7, 8, **pictures), **SETTINGS, **GIVEN)


def test_patches_that_are_tokens_of_the_text_are_read():
    """Fuyu's; a row each, as its `generate` has them."""
    model = built("fuyu", image_token_id=IMAGE)
    inputs = prompt(5, *[IMAGE] * 4, 9, 10, 11, image_patches=torch.randn(1, 4, 3 * 8 * 8))
    ours, wanted = model.generate(**inputs, **SETTINGS, **GIVEN), model.generate(**inputs, **SETTINGS)
    assert torch.equal(ours.sequences, wanted.sequences)


def test_audio_is_read_as_pictures_are():
    """Voxtral's: the draft hears what the target hears."""
    config = tiny_config("voxtral")
    untie(config)
    config.audio_token_id = IMAGE
    config.audio_config.max_source_positions, config.audio_config.intermediate_size = 8, 128
    torch.manual_seed(0)
    model = lively(VoxtralForConditionalGeneration(config).eval(), 0)
    model.generation_config.pad_token_id = 0
    draft = near(model)
    sound = torch.randn(1, config.audio_config.num_mel_bins, 16, generator=torch.Generator().manual_seed(1))
    inputs = prompt(5, 6, IMAGE, IMAGE, 7, 8, 9, input_features=sound)
    wanted = hla.enable(model).generate(**inputs, **SETTINGS).sequences
    assert not torch.equal(model.generate(**inputs | {"input_features": -sound}, **SETTINGS).sequences, wanted)
    out = model.generate(**inputs, **SETTINGS, assistant_model=draft, lossy_policy="strict")
    assert torch.equal(out.sequences, wanted) and out.speculation.draft_acceptance_rate > 0


def test_layers_that_keep_a_picture_in_the_cache_are_refused_and_their_text_is_not():
    """Mllama's cross-attention holds the picture's keys where the others hold the text's."""
    small = {"cross_attention_layers": [1], "num_hidden_layers": 3}
    eye = {"vision_output_dim": 64, "intermediate_layers_indices": [0], "max_num_tiles": 1}
    eye |= {"supported_aspect_ratios": [[1, 1]]}
    changes = {"text_config": small, "vision_config": eye, "image_token_index": IMAGE}
    model = hla.enable(tiny_model("mllama", "image-text", "sdpa", 0, **changes))
    for text in (one(vocab=90), ragged(vocab=90)):
        out = model.generate(**text, **SETTINGS, **GIVEN)
        assert torch.equal(out.sequences, model.generate(**text, **SETTINGS).sequences)
    picture = {"pixel_values": torch.randn(1, 1, 1, 3, 16, 16), "aspect_ratio_ids": torch.ones(1, 1).long()}
    picture["aspect_ratio_mask"] = torch.ones(1, 1, 1, dtype=torch.int64)
    picture["cross_attention_mask"] = (torch.arange(6) > 1).long()[None, :, None, None]
    with pytest.raises(ValueError, match="keeps 5, 6 places in its cache for a prompt of 6 tokens"):
        model.generate(**prompt(5, 6, IMAGE, 7, 8, 9, **picture), **SETTINGS, **GIVEN)


def test_tokens_hidden_behind_a_picture_are_refused_and_padding_is_not():
    inputs = prompts_of("gemma3", [1])
    given = inputs | {"attention_mask": inputs["attention_mask"].clone()}
    given["attention_mask"][0, -3] = 0
    with pytest.raises(ValueError, match="attention_mask hides tokens between others in a prompt with more than text"):
        assisted("gemma3", given, assistant_model=draft_of("gemma3"))
