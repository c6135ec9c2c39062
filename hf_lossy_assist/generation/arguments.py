"""All arguments and settings of Transformers' `generate`, and their status in a call with a policy.

Transformers checks the values. A mode that this loop does not run would be ignored in silence, so it is refused by name, as is a setting of a
Transformers release newer than these lists. `tools/arguments_page.py` writes docs/arguments.md from them.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..models.compiled.compilation import STATIC
from ..models.facts import CACHE_NAMES
from ..validation import shown


# Synonyms for a cache that grows with the text, since Transformers infers the layer types from the model.
GROWING = (None, "dynamic", "hybrid", "hybrid_chunked", "sliding_window")
PAGED = "paged"  # at a call it selects another loop; in a config Transformers treats it as "dynamic"
HONOURED = frozenset(
    """
    inputs generation_config kwargs logits_processor prefix_allowed_tokens_fn stopping_criteria assistant_model streamer
    max_new_tokens max_length min_length min_new_tokens max_time stop_strings
    eos_token_id pad_token_id bos_token_id decoder_start_token_id
    do_sample temperature top_k top_p min_p typical_p top_h epsilon_cutoff eta_cutoff num_return_sequences
    repetition_penalty encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias forced_bos_token_id forced_eos_token_id
    exponential_decay_length_penalty renormalize_logits remove_invalid_values watermarking_config
    return_dict_in_generate output_scores output_logits use_cache prefill_chunk_size
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit use_mtp speculation_type
    cache_implementation compile_config disable_compile synced_gpus
    """.split()
)
# The unsupported feature that a setting requests, and the value, besides None, that does not request it.
REFUSED: dict[str, tuple[str, object]] = {
    "num_beams": ("beam search", 1),
    "num_beam_groups": ("group beam search", 1),
    "diversity_penalty": ("group beam search", 0.0),
    "constraints": ("constrained beam search", None),
    "force_words_ids": ("constrained beam search", None),
    "penalty_alpha": ("contrastive search", 0.0),
    "dola_layers": ("DoLa", None),
    "guidance_scale": ("classifier-free guidance", 1.0),
    "assistant_ensemble_weight": ("Transformers' own lossy rule", None),
    "custom_generate": ("another decoding loop", None),
    "return_token_timestamps": ('Whisper\'s word timestamps (return_timestamps="word"), made of attentions', False),
    "output_attentions": ("with outputs of this kind", False),
    "output_hidden_states": ("with outputs of this kind", False),
    "token_healing": ("token healing", False),
    "is_assistant": ("as the draft of Transformers' own assisted generation", False),
}
WITHOUT_EFFECT = {
    "negative_prompt_ids": "classifier-free guidance only",
    "negative_prompt_attention_mask": "classifier-free guidance only",
    "early_stopping": "beam search only",
    "length_penalty": "beam search only",
    "low_memory": "contrastive search only",
    "cache_config": "quantised caches only",
    "assistant_lookbehind": "a draft with another tokenizer re-tokenizes a fixed window",
    "target_lookbehind": "a draft with another tokenizer re-tokenizes a fixed window",
    "max_cache_len": "the cache grows with the sequence",
    "continuous_batching_config": "`generate_batch` only",
    "transformers_version": "a note in the file",
}
# Arguments for a single call or its rows, and the value in a generation config that requests nothing; None: a config may have any.
PER_CALL: dict[str, object] = {
    **dict.fromkeys(
        ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", *CACHE_NAMES)
    ),
    **dict.fromkeys(("streamer", "generator", "return_dict_in_generate", "max_length")),
    "output_scores": False,
    "output_logits": False,
    "num_return_sequences": 1,
}
# Settings of a newer Transformers release, with their defaults.
UNKNOWN = {
    name: value
    for name, value in vars(GenerationConfig()).items()
    if not (name.startswith("_") or name in HONOURED or name in REFUSED or name in WITHOUT_EFFECT)
}
DEFAULTS = GenerationConfig._get_default_generation_params()  # are in every config that `generate` prepared


def complete_config(given: GenerationConfig | None, model_config: GenerationConfig) -> GenerationConfig:
    """Return a copy of a call's config in which, as in Transformers, settings that it leaves open come from the model's."""
    config = copy.deepcopy(given) if given is not None else GenerationConfig()
    config.update(**model_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    return config


class Settings:
    """The settings of a call, from its sources in order.

    Args:
        call: the arguments of the call, completed by standing ones or by those of a `Runner`.
        config: the call's generation config, in which the model's completes what it leaves open.
        model_config: the model's generation config.
    """

    def __init__(self, call: Mapping[str, object], config: GenerationConfig, model_config: GenerationConfig | None):
        self.call, self.config, self.model_config = call, config, model_config

    def __getitem__(self, name: str) -> Any:
        """Return the effective value."""
        return self.call[name] if name in self.call else getattr(self.config, name, None)

    def resolve(self, name: str, draft_config: GenerationConfig | None = None) -> Any:
        """Return the call's value, or that of `draft_config`; None: neither has one.

        In the call's config, values of the model's config and Transformers' defaults do not count.
        """
        if self.call.get(name) is not None:
            return self.call[name]
        value = getattr(self.config, name, None)
        if value is None or value in (DEFAULTS.get(name), getattr(self.model_config, name, None)):
            return getattr(draft_config, name, None)
        return value

    def is_passed(self, name: str) -> bool:
        """Return whether the call passed the setting."""
        return name in self.call or self[name] != getattr(self.model_config, name, None)

    def way_out(self, name: str, off: object) -> str:
        """Return the advice for removing a setting: omit it, or override the model's config (FSMT's, for example, has five beams)."""
        if self.is_passed(name):
            return f"leave {name} out"
        return (
            f"the generation config has it, so pass {name}={off!r}, on the command line --set {name}={json.dumps(off)}"
        )


def refuse_modes(settings: Settings) -> None:
    """Raise `ValueError` for a decoding mode that this loop does not run."""
    for name, (feature, off) in REFUSED.items():
        value = settings[name]
        if value is not None and value != off:
            raise ValueError(
                f"lossy_policy does not run {feature}, which {name}={shown(value)} asks for: {settings.way_out(name, off)}, or "
                "leave lossy_policy out"
            )
    for name, off in UNKNOWN.items():
        if settings[name] is not None and settings[name] != off:
            raise ValueError(
                f"{name} is a setting of a Transformers newer than this package knows: leave {name} or lossy_policy out"
            )
    known = (*GROWING, STATIC) if settings.is_passed("cache_implementation") else (*GROWING, STATIC, PAGED)
    if settings["cache_implementation"] not in known:
        raise ValueError(
            f"lossy_policy keeps its own cache, got cache_implementation={shown(settings['cache_implementation'])}: "
            f"{settings.way_out('cache_implementation', 'dynamic')}"
        )


def refuse_per_call(settings: Settings) -> None:
    """Raise `ValueError` for a setting of a single call, which `generate_many` cannot have."""
    for name, off in PER_CALL.items():
        value = settings.call.get(name) if off is None else settings[name]
        if value is not None and value != off:
            way_out = settings.way_out(name, off)
            raise ValueError(f"{name} belongs to one call, and generate_many makes one for each prompt: {way_out}")


def refuse_config(model: PreTrainedModel) -> None:
    """Raise `ValueError`, one line, for unsupported modes in the model's generation config, before the first call."""
    refuse_modes(Settings({}, model.generation_config, model.generation_config))
