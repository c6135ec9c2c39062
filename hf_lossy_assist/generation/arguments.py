"""Every argument and setting of Transformers' `generate`, in one of three lists: honoured, refused, or without effect here.

docs/arguments.md is the same for readers; tests/generation/test_arguments.py holds both against the installed Transformers, so that a
name that a new release brings is decided on before it is passed over.
"""

from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig


HONOURED = frozenset(
    "inputs generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn assistant_model streamer kwargs "
    "max_length max_new_tokens min_length min_new_tokens max_time stop_strings eos_token_id pad_token_id bos_token_id "
    "decoder_start_token_id do_sample temperature top_k top_p top_h min_p typical_p epsilon_cutoff eta_cutoff "
    "repetition_penalty encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens sequence_bias num_return_sequences output_scores output_logits "
    "return_dict_in_generate num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit "
    "use_mtp speculation_type watermarking_config cache_implementation compile_config disable_compile synced_gpus".split()
)  # watermarking_config: SynthID for one text at a time; cache_implementation: but for offloaded, quantised and paged ones

# Where `unsupported` says no to a value that would change something.
REFUSED = frozenset(
    "custom_generate num_beams use_cache token_healing guidance_scale output_attentions "
    "output_hidden_states assistant_ensemble_weight penalty_alpha dola_layers num_beam_groups "
    "diversity_penalty constraints force_words_ids is_assistant".split()
)

WITHOUT_EFFECT = {
    "negative_prompt_ids": "a part of classifier-free guidance, which is refused; read by nothing without it",
    "negative_prompt_attention_mask": "a part of classifier-free guidance, which is refused; read by nothing without it",
    "early_stopping": "of beam search alone, which is refused",
    "length_penalty": "of beam search alone, which is refused",
    "low_memory": "of contrastive search alone, which is refused",
    "cache_config": "of quantised caches alone, which are refused",
    "assistant_lookbehind": "a draft with another tokenizer reads a window of its own",
    "target_lookbehind": "a draft with another tokenizer reads a window of its own",
    "max_cache_len": "storage here grows with the text",
    "prefill_chunk_size": "a prompt is run in one forward here: the same text, with more memory",
    "continuous_batching_config": "of generate_batch alone",
    "transformers_version": "a note in the file",
}


def _given(value: Any) -> bool:
    return value is not None


def _above(low: float) -> Callable[[Any], bool]:
    return lambda value: value is not None and not (isinstance(value, int | float) and value <= low)


# Modes that Transformers starts by a setting alone: when it is asked for, and what it is.
MODES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "penalty_alpha": (_above(0), "contrastive search"),
    "dola_layers": (_given, "DoLa"),
    "num_beam_groups": (_above(1), "group beam search"),
    "diversity_penalty": (_above(0), "group beam search"),
    "constraints": (_given, "constrained beam search"),
    "force_words_ids": (_given, "constrained beam search"),
    "is_assistant": (bool, "as the draft of Transformers' own assisted generation"),
}

# What a release newer than these lists has: its value when nobody sets it.
UNKNOWN = {
    name: value
    for name, value in vars(GenerationConfig()).items()
    if not name.startswith("_") and name not in HONOURED | REFUSED | WITHOUT_EFFECT.keys()
}


def refuse_modes_asked_for(settings: Any) -> None:
    """Refuse decoding modes that this loop does not run; `settings[name]` is a setting as the call has it."""
    for name, (asked, what) in MODES.items():
        if asked(settings[name]):
            raise ValueError(
                f"lossy_policy does not run {what}, which {name} asks for: {settings.way_out(name, None)}, or leave lossy_policy out"
            )
    for name, neutral in UNKNOWN.items():
        if settings[name] is not None and settings[name] != neutral:
            raise ValueError(
                f"{name} is a setting of a Transformers newer than this package knows: leave {name} or lossy_policy out"
            )
