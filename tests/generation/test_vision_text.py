"""Models that could see, given text alone: as any decoder."""

import pytest
import torch
from support.small import VOCAB, louder, near, one, ragged
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SiglipVisionConfig,
)

import hf_lossy_assist as hla
from hf_lossy_assist.models.early_exit import leaves_early


IMAGE = 96  # the token that stands for a piece of an image
EYE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
EYE |= {"image_size": 8, "patch_size": 4}
TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
TEXT |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def llava():
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**EYE), text_config=LlamaConfig(**TEXT), image_token_index=IMAGE
    )
    config.image_token_id = IMAGE
    return LlavaForConditionalGeneration(config)


def gemma3():
    kinds = ["sliding_attention", "full_attention"]
    text = Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=8, layer_types=kinds)
    eye = SiglipVisionConfig(**EYE)
    config = Gemma3Config(text_config=text, vision_config=eye, mm_tokens_per_image=4, image_token_index=IMAGE)
    return Gemma3ForConditionalGeneration(config)


def mistral3():
    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**EYE), text_config=MistralConfig(**TEXT), image_token_index=IMAGE
    )
    return Mistral3ForConditionalGeneration(config)


def qwen25vl():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    eye = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    special = {"image_token_id": IMAGE, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}
    config = Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=eye, **special)
    return Qwen2_5_VLForConditionalGeneration(config)


MODELS = (llava, gemma3, mistral3, qwen25vl)


def ready(build):
    """A random model of its kind and a draft that often agrees with it; neither ends a text."""
    torch.manual_seed(0)
    model = louder(build().eval())
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return hla.enable(model), near(hla.disable(model))


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("inputs", [one(vocab=90), ragged(vocab=90)], ids=["one row", "rows of different length"])
def test_a_text_alone_is_written_as_generate_writes_it(build, inputs):
    model, draft = ready(build)
    settings = inputs | {"max_new_tokens": 12, "do_sample": False}
    out = hla.enable(model).generate(
        **settings, assistant_model=draft, lossy_policy="strict", return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, model.generate(**settings))
    assert out.speculation.draft_acceptance_rate > 0


@pytest.mark.parametrize("build", MODELS)
def test_its_first_layers_draft_for_it(build):
    """They are in a decoder inside the model that sees."""
    model, _ = ready(build)
    settings = ragged(vocab=90) | {"max_new_tokens": 12, "do_sample": False}
    draft = hla.early_exit(hla.enable(model), 1)
    assert leaves_early(draft, model)
    assert draft(settings["input_ids"]).logits.ne(model(settings["input_ids"]).logits).any()
    out = model.generate(**settings, assistant_model=draft, lossy_policy="strict")
    assert torch.equal(out, model.generate(**settings))
