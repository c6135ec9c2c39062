"""Models that see: the prompt is read once, with its pictures, as `generate` has it read; then rounds are text, row by row."""

import re
from functools import wraps
from pathlib import Path

import pytest
import torch
from support import eagle
from support.seeing import SETTINGS, assisted, draft_of, model_of, prompts_of, reads_images, written
from support.small import llama, tokenizer
from support.tiny import cache_of
from tiny_models import tiny_model
from tiny_vision import END, IMAGE, SEEN, START, VIDEO
from transformers import DynamicCache

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
    "compiled rounds, where they can be": lambda name: {
        "assistant_model": draft_of(name),
        "cache_implementation": "static",
    },
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


@pytest.mark.full(every=3)
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
    with pytest.raises(
        ValueError, match="drafts from the same images, which custom_generate is not handed: pass lossy"
    ):
        model_of(name).generate(**inputs, **SETTINGS, custom_generate=sees)


def many_with_pictures():
    pictures = {"pixel_values": torch.zeros(1, 3, 16, 16)}
    return hla.generate_many(model_of("llava"), [[5, 6]], assistant_model=llama(), **pictures)


REFUSED = (
    (
        lambda: assisted("llava", prompts_of("llava", (1,)), assistant_model=draft_of("smolvlm")),
        "the draft SmolVLMForConditionalGeneration cannot be given what the target is given .*: pass a draft of",
    ),
    (many_with_pictures, "generate_many takes text prompts only, got pixel_values: call generate"),
    (
        lambda: assisted("gemma3", another_picture(), assistant_model=llama().float()),
        f"{CACHE} goes on with text alone, and images or sounds were passed: leave {CACHE} out",
    ),
    (
        lambda: assisted("llava", ends_with_a_picture(), assistant_model=llama().float()),
        "row 0 ends with a piece of an image, and a prompt must end with text: put a token behind it",
    ),
)


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
    for call, line in REFUSED:
        with pytest.raises((ValueError, TypeError), match=rf"^[^\n]*{line}[^\n]*$"):
            call()


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
