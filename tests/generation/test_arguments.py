"""Every argument of `generate` and setting of `GenerationConfig` is honoured, refused or without effect, as the lists say; a new one fails the first test."""

import inspect
import re

import arguments_page
import pytest
import torch
from support import eagle, tiny
from support.small import PAD, VOCAB, Listener, llama, near, one, ragged, t5, tokenizer
from support.tiny import cache_of
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteria, WatermarkingConfig
from transformers.generation import ContinuousBatchingConfig

import hf_lossy_assist as hla
from hf_lossy_assist.generation import arguments
from hf_lossy_assist.generation.arguments import HONOURED, IGNORED, REFUSED, Settings
from hf_lossy_assist.generation.draft_settings import PromptLookup, choose_draft
from hf_lossy_assist.models.row_model import RowModel


NEW = 16


def installed() -> set[str]:
    """Return the names of all arguments that this Transformers has."""
    of_call = set(inspect.signature(GenerationMixin.generate).parameters) - {"self"}
    return of_call | {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def test_every_name_of_transformers_stands_in_one_list():
    names = [*HONOURED, *REFUSED, *IGNORED]
    assert set(names) >= installed() and len(names) == len(set(names)) and not arguments.UNKNOWN


def test_the_page_is_what_the_table_writes():
    assert arguments_page.PAGE.read_text(encoding="utf-8") == arguments_page.write_page()  # tools/arguments_page.py


@pytest.fixture(scope="module")
def models():
    return hla.enable(llama()), near(llama())


def given(settings):
    return {name: value for name, value in settings.items() if value is not ...}


def ours(models, **settings):
    target, draft = models
    needed = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": draft, "lossy_policy": "strict"}
    return target.generate(**given(ragged() | needed | settings))


def stock(models, **settings):
    """Transformers' own text of the target alone."""
    needed = {"max_new_tokens": NEW, "do_sample": False}
    return GenerationMixin.generate(models[0], **given(ragged() | needed | settings))


def same(ours, expected):
    return ours.shape == expected.shape and torch.equal(ours, expected)


# -- honoured ---------------------------------------------------------------------------------------------------------------


class AtFourteen(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        return torch.full((ids.shape[0],), ids.shape[1] >= 14)


def low_from_20_to_60(ids, scores):
    return scores.index_fill(1, torch.arange(20, 60), -9.0)


PROMPT = one()
FIRST = stock((llama(),), **PROMPT)[0, 9:].tolist()
ENDS = PROMPT | {"eos_token_id": FIRST[5]}
SAMPLED = {"do_sample": True, "top_k": 0, "repetition_penalty": 1.1}  # with a setting that leaves one token to draw

# name: settings of a call whose text is what it is by this setting alone
TEXTS = {
    "inputs": {"inputs": PROMPT["input_ids"] + 1, "input_ids": ..., "attention_mask": ...},
    "generation_config": {"generation_config": GenerationConfig(repetition_penalty=1.8, pad_token_id=PAD)},
    "kwargs": {"attention_mask": torch.tensor([[1] * 9, [0] * 6 + [1] * 3, [0] + [1] * 8])},
    "logits_processor": {"logits_processor": LogitsProcessorList([low_from_20_to_60])},
    "stopping_criteria": {"stopping_criteria": [AtFourteen()]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(4 + row, VOCAB, 2))},
    "max_length": {"max_length": 14, "max_new_tokens": ...},
    "max_new_tokens": {"max_new_tokens": 5},
    "eos_token_id": ENDS,
    "pad_token_id": {"eos_token_id": FIRST[3], "pad_token_id": 5},
    "min_length": ENDS | {"min_length": 20},
    "min_new_tokens": ENDS | {"min_new_tokens": 12},
    "stop_strings": PROMPT | {"stop_strings": [f"w{FIRST[5] - 4}"], "tokenizer": tokenizer()},
    "temperature": SAMPLED | {"temperature": 1e-5},
    "top_k": SAMPLED | {"top_k": 1},
    "top_p": SAMPLED | {"top_p": 1e-6},
    "top_h": SAMPLED | {"top_h": 1e-6},
    "min_p": SAMPLED | {"min_p": 1.0},
    "typical_p": SAMPLED | {"typical_p": 1e-6},
    "epsilon_cutoff": SAMPLED | {"epsilon_cutoff": 0.9999},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.9},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[FIRST[0]], [FIRST[2], FIRST[3]]]},
    "suppress_tokens": {"suppress_tokens": FIRST[:4]},
    "begin_suppress_tokens": {"begin_suppress_tokens": FIRST[:1]},
    "sequence_bias": {"sequence_bias": {(FIRST[1],): -50.0, (7,): 3.0}},
    "forced_bos_token_id": {"forced_bos_token_id": 11, "input_ids": PROMPT["input_ids"][:, :1], "attention_mask": ...},
    "forced_eos_token_id": {"forced_eos_token_id": 12},
    "exponential_decay_length_penalty": PROMPT | {"eos_token_id": 70, "exponential_decay_length_penalty": (3, 2.5)},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=20.0)},
    "bos_token_id": {"bos_token_id": 8, "input_ids": ..., "attention_mask": ...},
}


def test_warpers_that_leave_several_tokens(models):
    """`eta_cutoff`: the first place's scores, which have the same prefix whatever is drawn behind it."""
    settings = {"do_sample": True, "top_k": 0, "return_dict_in_generate": True, "output_scores": True}
    first = [run(models, **settings, eta_cutoff=0.9).scores[0] for run in (ours, stock)]
    assert torch.allclose(*first, atol=1e-4) and 0 < first[0].isneginf().float().mean() < 1


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3))])
def test_an_honoured_setting_changes_the_text_as_in_transformers(models, first):
    plain = stock(models)
    for name, settings in list(TEXTS.items())[first::4]:
        expected = stock(models, **settings)
        assert same(ours(models, **settings), expected), name
        if name not in ("bos_token_id", "max_length"):  # without them there is no prompt, and a warning
            others = {} if name in ("inputs", "kwargs") else {key: settings[key] for key in settings if key != name}
            without = stock(models, **others) if others else plain
            assert not same(without, expected), f"{name}: what changes nothing proves nothing"


def test_settings_of_encoder_decoders():
    pair = hla.enable(t5()), near(t5(), noise=0.01)
    settings = PROMPT | {"decoder_start_token_id": 9}
    expected = stock(pair, **settings)
    assert same(ours(pair, **settings), expected) and not same(stock(pair, **PROMPT), expected)


def test_outputs(models):
    """`return_dict_in_generate`, `output_scores`, `output_logits`; scores show `renormalize_logits`."""
    settings = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    settings |= {"repetition_penalty": 1.8, "renormalize_logits": True}
    out, expected = ours(models, **settings), stock(models, **settings)
    assert same(out.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert torch.allclose(torch.stack(out[name]), torch.stack(expected[name]), atol=1e-4)
    assert not torch.allclose(torch.stack(out.logits), torch.stack(out.scores), atol=1e-2)
    assert out.scores[0].exp().sum().item() == pytest.approx(3.0, abs=1e-4)


def test_sampling_and_several_sequences(models):
    """`do_sample`, `num_return_sequences`."""
    settings = {"do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True}
    out = ours(models, **settings).sequences
    assert out.shape == (6, 9 + NEW) and not torch.equal(out[0], out[1])
    settings |= {"top_k": 1}
    assert same(ours(models, **settings).sequences, stock(models).repeat_interleave(2, dim=0))


def test_a_streamer_hears_every_token(models):
    streamer = Listener()
    out = ours(models, **PROMPT, streamer=streamer)
    assert streamer.heard == [*out[0].tolist(), "end"]


def test_time_that_is_over_ends_the_text_after_a_round(models):
    out, expected = ours(models, **PROMPT, max_time=1e-9), stock(models, **PROMPT)
    assert 9 < out.shape[1] < expected.shape[1] and same(out, expected[:, : out.shape[1]])


def test_values_that_are_not_numbers_are_removed(models):
    target = llama()
    with torch.no_grad():
        target.get_output_embeddings().weight[40:] = float("nan")
    pair = hla.enable(target), models[1]
    assert same(ours(pair, remove_invalid_values=True), stock(pair, remove_invalid_values=True))


def rounds(models, **settings):
    """(sent, accepted) of each round, and the longest draft."""
    out = ours(models, **PROMPT, **settings, return_dict_in_generate=True)
    assert same(out.sequences, stock(models, **PROMPT))
    return list(out.speculation.total().steps)


def test_settings_of_the_draft(models):
    """`assistant_model` and how much it drafts: the text stays, the rounds change."""
    assert max(sent for sent, _ in rounds(models, num_assistant_tokens=3)) == 3
    assert max(sent for sent, _ in rounds(models, num_assistant_tokens=9)) == 9
    assert max(sent for sent, _ in rounds(models, assistant_confidence_threshold=1.0)) == 1
    longer = {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "heuristic"}
    assert max(sent for sent, _ in rounds((models[0], llama()), **longer)) > 2


def test_other_ways_to_draft(models):
    """`prompt_lookup_num_tokens`, `max_matching_ngram_size`, `assistant_early_exit`."""
    assert max(sent for sent, _ in rounds(models, assistant_model=None, prompt_lookup_num_tokens=4)) == 4
    exits = rounds(models, assistant_model=None, assistant_early_exit=1)
    assert max(sent for sent, _ in exits) == 5
    for size, longest in ((None, 2), (3, 3), (100, 64)):  # Transformers' default, and what an index holds
        ways = Settings({"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": size}, GenerationConfig(), None)
        assert choose_draft(models[0], None, None, ways) == (None, PromptLookup(1, longest, 4.0, 4))
    with pytest.raises(ValueError, match="^prompt_lookup_num_tokens and assistant_early_exit are two ways to draft"):
        rounds(models, assistant_model=None, prompt_lookup_num_tokens=4, assistant_early_exit=1)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.full) for n in ("gemma3", "lfm2"))])
def test_prompts_are_read_in_pieces(name, monkeypatch):
    """`prefill_chunk_size`, of the target and of its draft."""
    widths, feed = [], RowModel.feed

    def seen(model, tokens, counts, keep=None):
        widths.extend([tokens.shape[1]] * (keep == 0))
        return feed(model, tokens, counts, keep)

    monkeypatch.setattr(RowModel, "feed", seen)
    pair = hla.enable(tiny.build(name)), tiny.draft_of(tiny.shared(name), "often")
    expected = stock(pair)
    ours(pair)  # which probes the models
    widths.clear()
    assert same(ours(pair), expected)
    whole, before = max(widths), len(widths)
    assert same(ours(pair, prefill_chunk_size=3), expected) and whole == 8
    assert max(widths[before:]) == 3 and len(widths) - before >= 3 * before


def test_without_a_cache_the_text_is_the_same_and_the_output_holds_none():
    """`use_cache` at the call and in a config."""
    settings = {"input_ids": torch.arange(4, 12)[None], "max_new_tokens": 6, "return_dict_in_generate": True}
    for name in ("llama", "gemma3", "lfm2"):
        target, draft = hla.enable(tiny.build(name)), tiny.build(name, seed=1)
        expected = GenerationMixin.generate(target, **settings, use_cache=True).sequences
        given = settings | {"assistant_model": draft, "lossy_policy": "strict"}
        outs = [target.generate(**given, use_cache=False)]
        target.generation_config.use_cache = False
        outs += [target.generate(**given)]
        assert all(torch.equal(out.sequences, expected) and cache_of(out) is None for out in outs), name
        assert outs[0].speculation.num_draft_tokens > 0


def test_a_process_alone_is_in_step(models):
    assert same(ours(models, synced_gpus=True), stock(models))


def test_drafting_from_the_targets_states(models):
    """`use_mtp` is in test_lossless.py; with this package's own drafters `speculation_type` says nothing."""
    dflash = hla.DFlashDrafter(eagle.dflash_network(models[0], target_layers=(0, 1)))
    assert same(ours((models[0], dflash), speculation_type="dflash"), stock(models))


def test_every_honoured_name_is_tried():
    compiled = {"cache_implementation", "compile_config", "disable_compile"}  # tests/engine/test_compiled.py
    tests = [test for name, test in globals().items() if name.startswith("test_") and test is not test_every_honoured_name_is_tried]  # fmt: skip
    tried = {name for test in tests for name in re.findall(r"\w+", inspect.getsource(test))} | TEXTS.keys() | compiled
    assert not HONOURED - tried


# -- refused ----------------------------------------------------------------------------------------------------------------


VALUES = {
    "custom_generate": hla.Runner("svip", llama()), "num_beams": 4, "token_healing": True, "return_token_timestamps": True,
    "guidance_scale": 2.0, "output_attentions": True, "output_hidden_states": True, "assistant_ensemble_weight": 0.5,
    "penalty_alpha": 0.6, "dola_layers": "high", "num_beam_groups": 2, "diversity_penalty": 0.5, "constraints": [object()],
    "force_words_ids": [[5]], "is_assistant": True,
}  # fmt: skip


@pytest.mark.parametrize("where", ["at the call", "in the model's config", "Runner"])
def test_a_refused_name_is_named_in_one_line(models, where):
    of_call = set(inspect.signature(GenerationMixin.generate).parameters)
    names = REFUSED if where == "at the call" else REFUSED.keys() - of_call  # which are no settings of a config
    target, draft = hla.enable(llama()), models[1]
    given = {"max_new_tokens": 4, "return_dict_in_generate": True}
    given |= {"custom_generate": hla.Runner("strict", draft)} if where == "Runner" else {}
    given |= {"assistant_model": draft, "lossy_policy": "strict"} if where != "Runner" else {}
    for name in names:
        settings = given | {name: VALUES[name]} if where != "in the model's config" else given
        if where == "in the model's config":
            target.generation_config = GenerationConfig(pad_token_id=PAD)
            setattr(target.generation_config, name, VALUES[name])
        # Of Whisper's, which Llama lacks:
        error = ValueError if name in installed() or where != "at the call" else TypeError
        with pytest.raises(error, match="^[^\n]*" + name.replace("_", "[_ ]") + "[^\n]*$"):
            target.generate(**PROMPT, **settings)


def test_a_mode_that_is_off_is_accepted(models):
    assert same(ours(models, penalty_alpha=0.0, num_beam_groups=1, diversity_penalty=0.0), stock(models))


def test_a_setting_of_a_newer_transformers_is_refused(models, monkeypatch):
    monkeypatch.setitem(arguments.UNKNOWN, "low_memory", None)  # as if no list had it
    with pytest.raises(ValueError, match="low_memory is a setting of a Transformers newer"):
        ours(models, low_memory=True)


# -- without effect ---------------------------------------------------------------------------------------------------------

IDLE = {
    "negative_prompt_ids": PROMPT["input_ids"], "negative_prompt_attention_mask": PROMPT["attention_mask"],
    "early_stopping": True, "length_penalty": 3.0, "low_memory": True, "cache_config": {"nbits": 2}, "max_cache_len": 400,
    "assistant_lookbehind": 7, "target_lookbehind": 6, "continuous_batching_config": ContinuousBatchingConfig(),
    "transformers_version": "5.0.0",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Passing ContinuousBatchingConfig:FutureWarning")
def test_a_setting_without_effect_has_none(models):
    assert same(ours(models, **{name: IDLE[name] for name in IGNORED}), stock(models))
