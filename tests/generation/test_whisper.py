"""Whisper, whose `generate` has arguments of its own and calls Transformers' one for each segment of the audio."""

import pytest
import torch
from support import small
from transformers import WhisperConfig, WhisperForConditionalGeneration

import hf_lossy_assist as hla
from hf_lossy_assist.generation.output import cuts_outputs


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 50}
    layers = dict.fromkeys(
        ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2
    )
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(
        vocab_size=120, num_mel_bins=8, max_target_positions=60, suppress_tokens=None, begin_suppress_tokens=None,
        **sizes, **layers, **special,
    )  # fmt: skip
    target = WhisperForConditionalGeneration(config).double().eval()
    settings = target.generation_config
    settings.no_timestamps_token_id, settings.prev_sot_token_id, settings.is_multilingual = 99, 12, True
    settings.lang_to_id, settings.task_to_id, settings.max_initial_timestamp_index = (
        {"<|en|>": 10},
        {"transcribe": 11},
        5,
    )
    return target, small.near(target, 0.1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"language": "en", "task": "transcribe"},
        {"language": "en", "return_timestamps": True, "return_segments": True},
        {"return_timestamps": True, "prompt_ids": torch.tensor([12, 20, 21])},
        {"return_timestamps": True, "return_dict_in_generate": True},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.parametrize("frames", [100, 250], ids=["one segment", "several"])
def test_its_own_arguments(models, frames, settings):
    audio = torch.randn(1, 8, frames, generator=torch.Generator().manual_seed(1)).double()
    if frames > 100:  # longer audio needs them
        settings = settings | {"return_timestamps": True, "attention_mask": torch.ones(1, frames, dtype=torch.long)}
    settings = settings | {"max_new_tokens": 12, "do_sample": False}
    expected = models[0].generate(audio, **settings)
    drafted = hla.enable(models[0]).generate(audio, assistant_model=models[1], lossy_policy="strict", **settings)
    if not isinstance(expected, torch.Tensor):
        expected, drafted = expected["sequences"], drafted["sequences"]
    assert torch.equal(drafted, expected)


def test_the_name_by_which_it_is_known(models):
    """It is private in Transformers."""
    assert cuts_outputs(models[0]) and not cuts_outputs(small.llama())


def test_a_misspelt_one_is_named(models):
    with pytest.raises(TypeError, match="'return_timestamp'; did you mean 'return_timestamps'"):
        hla.enable(models[0]).generate(
            torch.zeros(1, 8, 100).double(), assistant_model=models[1], lossy_policy="strict", return_timestamp=True
        )
