"""Whisper, whose `generate` calls Transformers' one for each stretch of the audio, with drafts that have an encoder and drafts that read the target's."""

import copy
from functools import cache

import pytest
import torch
from support import encoded
from transformers import WhisperForCausalLM

import hf_lossy_assist as hla


SHORT, LONG = 100, 330  # frames; 100 are what the encoder reads at once
TIMES = {"return_timestamps": True}
DICT = {"return_dict_in_generate": True}
CASES = {
    "plain": {}, "prompts": {"language": "en", "task": "transcribe"},
    "timestamps": TIMES | {"language": "en"}, "segments": TIMES | {"return_segments": True},
    "prompt": TIMES | {"prompt_ids": torch.tensor([12, 20, 21])},
    "previous text": TIMES | {"prompt_ids": torch.tensor([12, 20, 21]), "condition_on_prev_tokens": True},
    "outputs": DICT, "outputs and timestamps": DICT | TIMES,
    "silence": {"no_speech_threshold": 0.6, "logprob_threshold": -1.0, "temperature": (0.0,)},
    "suppressed": {"begin_suppress_tokens": [30, 20], "suppress_tokens": [40, 41, 50]},
}  # fmt: skip
NEW = {"max_new_tokens": 14}


@cache
def target():
    """30 seconds are 100 frames; tokens from 60 on are times."""
    model = encoded.build("whisper")
    settings = model.generation_config
    settings.no_timestamps_token_id, settings.prev_sot_token_id, settings.is_multilingual = 59, 12, True
    settings.lang_to_id, settings.task_to_id = {"<|en|>": 10, "<|de|>": 13}, {"transcribe": 11, "translate": 14}
    settings.max_initial_timestamp_index, settings.eos_token_id = 5, encoded.EOS
    return model


@cache
def draft(kind):
    """ "often", "rarely" or "never" right; "distilled": a decoder alone, which reads what the target's encoder gave."""
    return encoded.distilled(target()) if kind == "distilled" else encoded.draft_of(target(), kind)


def audio(rows, frames, seed=1):
    """Sounds of different length."""
    sound = torch.randn(rows, 8, frames, generator=torch.Generator().manual_seed(seed)).double()
    ends = torch.tensor([frames, frames - 60, frames - 80, frames - 30])[:rows, None]
    mask = (torch.arange(frames) < ends).long()
    return {"input_features": sound * mask[:, None], "attention_mask": mask}


def heard(output):
    """The ids that `generate` returned."""
    return output if isinstance(output, torch.Tensor) else output["sequences"]


def assisted(kind, policy="strict", **inputs):
    try:
        return hla.enable(target()).generate(**inputs, **NEW, assistant_model=draft(kind), lossy_policy=policy)
    finally:
        hla.disable(target())


@cache
def reference(name, rows, frames):
    return heard(target().generate(**audio(rows, frames), **CASES[name] | (TIMES if frames > SHORT else {}), **NEW))


QUICK = ("segments", "silence")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in QUICK else pytest.mark.nightly) for name in CASES])  # fmt: skip
def test_it_writes_generates_ids(name):
    # Transformers puts no prompt before previous texts unless it may condition on them.
    for rows, frames in ((4, SHORT), (1 if name == "prompt" else 4, LONG)):
        inputs = audio(rows, frames) | CASES[name] | (TIMES if frames > SHORT else {})
        for kind in ("often", "distilled"):
            assert torch.equal(heard(assisted(kind, **inputs)), reference(name, rows, frames)), (rows, frames, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rarely", "distilled", pytest.param("never", marks=pytest.mark.nightly)])
def test_drafts_of_every_kind(kind):
    policy = hla.SVIP(h=0.5) if kind == "distilled" else hla.Constant(12)
    out = assisted(kind, policy, return_segments=True, **audio(4, LONG), **TIMES)
    assert torch.equal(heard(out), reference("plain", 4, LONG))
    rate = out["speculation"].draft_acceptance_rate
    assert rate < 0.1 if kind == "never" else 0 < rate < 1


def test_languages_of_each_row_and_detected_ones():
    for more in ({"language": ["en", "de", "en", "de"]}, {"task": "translate"}):
        inputs = audio(4, SHORT) | more
        assert torch.equal(assisted("often", **inputs), target().generate(**inputs, **NEW)), more


def test_temperatures_that_are_fallen_back_to():
    """Rows whose text is too regular are decoded again, those alone: greedily, so that both say the same."""
    inputs = audio(4, SHORT) | DICT | {"temperature": (0.0, 0.0), "compression_ratio_threshold": 0.95}
    out = assisted("often", **inputs)
    assert torch.equal(heard(out), heard(target().generate(**inputs, **NEW))) and len(out.speculation.rows) > 4


# -- what a call reports --------------------------------------------------------------------------------------------------


def test_the_report_survives_where_outputs_are_cut_into_rows():
    inputs = audio(4, SHORT) | DICT | {"output_scores": True, "language": "en"}
    out = assisted("often", **inputs)
    stats = out.speculation
    assert isinstance(stats, hla.SpeculationStats) and type(out).__name__ == "SpeculativeEncoderDecoderOutput"
    assert len(stats.rows) >= 4 and 0 < stats.draft_acceptance_rate < 1 and stats.forwards["target"] > 0
    assert len(out.scores) == len(target().generate(**inputs, **NEW).scores)


@pytest.mark.parametrize("rows, frames", [(1, SHORT), pytest.param(4, LONG, marks=pytest.mark.full)])
def test_each_segment_has_a_report_and_all_have_one(rows, frames):
    out = assisted("often", **audio(rows, frames), **DICT, **TIMES)
    whole, found = out["speculation"], {}
    assert len(out["segments"]) == rows
    for segments in out["segments"]:
        for segment in segments:
            report = segment["result"]["speculation"]
            assert isinstance(report, hla.SpeculationStats) and len(report.rows) == 1
            assert report.num_new_tokens == report.rows[0].num_new_tokens >= len(segment["tokens"])
            found[id(report.rows[0])] = report.rows[0].num_new_tokens
    assert whole.num_new_tokens == sum(found.values()) and len(whole.rows) == len(found) >= rows
    assert "speculation" not in target().generate(**audio(rows, frames), **DICT, **TIMES, **NEW)


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_a_misspelt_setting_and_times_of_each_token_are_refused_by_name():
    with pytest.raises(TypeError, match="'return_timestamp'; did you mean 'return_timestamps'"):
        assisted("often", **audio(1, SHORT), return_timestamp=True)
    target().generation_config.alignment_heads = [[0, 0]]
    try:
        line = "word timestamps [^\n]* return_token_timestamps=True asks for: leave return_token_timestamps out"
        with pytest.raises(ValueError, match=line):
            assisted("often", **audio(1, SHORT), return_token_timestamps=True)
    finally:
        del target().generation_config.alignment_heads
        target().model.config._attn_implementation = "sdpa"


def test_a_decoder_of_another_encoder_is_named():
    config = copy.deepcopy(draft("distilled").config)
    config.d_model = 16
    other = WhisperForCausalLM(config).double().eval()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        hla.enable(target()).generate(**audio(1, SHORT), **NEW, assistant_model=other, lossy_policy="strict")
    hla.disable(target())


@pytest.mark.full
def test_a_standing_policy():
    """One report for each call of the caller's; beams are Transformers' own."""
    model, sounds, settings = copy.deepcopy(target()), audio(2, LONG), NEW | TIMES | {"language": "en"}
    expected = {beams: heard(model.generate(**sounds, **settings, num_beams=beams)) for beams in (1, 2)}
    with hla.using(model, draft("often")):
        assert torch.equal(heard(model.generate(**sounds, **settings)), expected[1])
        with pytest.warns(UserWarning, match="^Transformers' own generate wrote this text.*beam search"):
            assert torch.equal(heard(model.generate(**sounds, **settings, num_beams=2)), expected[2])
    [report] = hla.reports(model)
    assert len(report.rows) > 2 and report.num_accepted_draft_tokens
