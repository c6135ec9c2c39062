"""Models whose pictures are no tokens of the text, and one whose are: refused by name where a round cannot go on behind them."""

import pytest
import torch
from support import seeing
from support.seeing import SETTINGS
from support.small import llama, near, one, ragged
from tiny_models import lively, tiny_config, tiny_model, untie
from tiny_vision import IMAGE
from transformers import AutoModelForImageTextToText, VoxtralForConditionalGeneration

import hf_lossy_assist as hla


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
    picture = {
        "pixel_values": torch.randn(1, 1, 1, 3, 16, 16),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.int64),
    }
    picture["aspect_ratio_mask"] = torch.ones(1, 1, 1, dtype=torch.int64)
    picture["cross_attention_mask"] = (torch.arange(6) > 1).long()[None, :, None, None]
    with pytest.raises(ValueError, match="keeps 5, 6 places in its cache for a prompt of 6 tokens"):
        model.generate(**prompt(5, 6, IMAGE, 7, 8, 9, **picture), **SETTINGS, **GIVEN)


def test_tokens_hidden_behind_a_picture_are_refused_and_padding_is_not():
    inputs = seeing.prompts_of("gemma3", [1])
    given = inputs | {"attention_mask": inputs["attention_mask"].clone()}
    given["attention_mask"][0, -3] = 0
    with pytest.raises(ValueError, match="attention_mask hides tokens between others in a prompt with more than text"):
        seeing.assisted("gemma3", given, assistant_model=seeing.draft_of("gemma3"))
