"""All arguments and settings of Transformers' `generate`, and their status in a call with a policy.

Transformers checks the values. A mode that this loop does not run would be ignored in silence, so it is refused by
name, as is a setting of a Transformers release newer than these lists. `tools/arguments_page.py` writes
docs/arguments.md from them.
"""

import copy
import difflib
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ..models.compiled.compilation import STATIC
from ..models.facts import CACHE, CACHE_NAMES
from ..models.introspection import base_of, tokens_known, vocabulary_of
from ..models.multimodal import EMBEDDINGS, is_multimodal
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
IGNORED = {
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
# Arguments for a single call or its rows, and the value in a generation config that requests nothing; None: a config
# may have any.
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
    if not (name.startswith("_") or name in HONOURED or name in REFUSED or name in IGNORED)
}
DEFAULTS = GenerationConfig._get_default_generation_params()  # are in every config that `generate` prepared


def complete_config(passed: GenerationConfig | None, model_config: GenerationConfig) -> GenerationConfig:
    """Return a copy of a call's config in which, as in Transformers, settings that it leaves open come from the
    model's."""
    config = copy.deepcopy(passed) if passed is not None else GenerationConfig()
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
        """Return the advice for removing a setting: omit it, or override the model's config (FSMT's, for example, has
        five beams)."""
        if self.is_passed(name):
            return f"leave {name} out"
        way_out = f"pass {name}={off!r}, on the command line --set {name}={json.dumps(off)}"
        return f"the generation config has it, so {way_out}"


def refuse_modes(settings: Settings) -> None:
    """Raise `ValueError` for a decoding mode that this loop does not run."""
    for name, (feature, off) in REFUSED.items():
        value = settings[name]
        if value is not None and value != off:
            line = f"lossy_policy does not run {feature}, which {name}={shown(value)} asks for"
            raise ValueError(f"{line}: {settings.way_out(name, off)}, or leave lossy_policy out")
    for name, off in UNKNOWN.items():
        if settings[name] is not None and settings[name] != off:
            line = f"{name} is a setting of a Transformers newer than this package"
            raise ValueError(f"{line}: leave {name} or lossy_policy out")
    name = "cache_implementation"
    allowed = (*GROWING, STATIC) if settings.is_passed(name) else (*GROWING, STATIC, PAGED)
    if (value := settings[name]) not in allowed:
        way_out = settings.way_out(name, "dynamic")
        raise ValueError(f"lossy_policy keeps its own cache, got {name}={shown(value)}: {way_out}")


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


# -- inputs -----------------------------------------------------------------------------------------------------------


GENERATE = frozenset(inspect.signature(GenerationMixin.generate).parameters)
LABELS = "labels"  # passed by Trainer, ignored by `generate`
# Arguments of `generate` beyond its signature, the generation config and the model's forward.
EXTRA_NAMES = {"tokenizer", "assistant_tokenizer", "input_ids", "inputs_embeds", "attention_mask", "trust_remote_code"}
EXTRA_NAMES |= {LABELS, *CACHE_NAMES}
# Inputs from `generate` that a decoder on a `RowCache` accepts.
TEXT_INPUTS = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "token_type_ids"}


def refuse_arguments(model: PreTrainedModel, kwargs: dict[str, Any], config: GenerationConfig) -> None:
    """Raise `ValueError` or `TypeError` for arguments that this loop does not support, before Transformers prepares
    anything."""
    settings = Settings(kwargs, config, model.generation_config)
    ids = kwargs.get("inputs") if kwargs.get("inputs") is not None else kwargs.get("input_ids")
    _refuse_unknown(model, kwargs, config)
    refuse_modes(settings)
    if not isinstance(kwargs.get("logits_to_keep") or 0, int):
        raise TypeError("lossy_policy decides which logits a forward computes: leave logits_to_keep out")
    if ids is not None and model.main_input_name == "input_ids":
        refuse_prompt(model, ids)
    if kwargs.get("decoder_input_ids") is not None:
        _refuse_outside("decoder_input_ids", kwargs["decoder_input_ids"], "decoder", vocabulary_of(model))
    prompt = ids if kwargs.get(EMBEDDINGS) is None else kwargs[EMBEDDINGS][..., 0]
    if prompt is not None and model.main_input_name == "input_ids":
        refuse_mask(prompt, kwargs.get("attention_mask"), "attention_mask")
    copies = settings["num_return_sequences"] or 1
    if kwargs.get("streamer") is not None and prompt is not None and copies * len(prompt) > 1:
        raise ValueError("a streamer serves one row; pass prompts one by one, or leave streamer out")


def _refuse_unknown(model: PreTrainedModel, kwargs: Mapping[str, object], config: GenerationConfig) -> None:
    """Raise `TypeError` for names that neither `generate` nor the model has, which models with `**kwargs` would take in
    silence."""
    names = GENERATE | EXTRA_NAMES | vars(config).keys()
    for kind in {type(model), type(base_of(model))}:  # Whisper's `generate` has additional arguments
        calls = (getattr(kind, name, None) for name in ("forward", "prepare_inputs_for_generation", "generate"))
        names |= frozenset().union(*(_parameters(call) for call in calls if call is not None))
    for name, value in kwargs.items():
        if name not in names and not name.startswith("decoder_") and value is not None:
            # `cache` is the name in newer releases of Transformers.
            close = [CACHE] if name == "cache" else difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ": leave it out"
            raise TypeError(f"generate: this model takes no argument {shown(name)}{hint}")


@functools.cache
def _parameters(call: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(call).parameters) - {"self", "kwargs", "args"}


# -- tensors ----------------------------------------------------------------------------------------------------------


def refuse_prompt(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raise an error for `input_ids` (B, length) that the target cannot embed."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
        got = f"{ids.dtype} of {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        way_out = "generate(**tokenizer(texts, return_tensors='pt'))"
        raise TypeError(f"input_ids: expected token ids of shape (batch, length), got {got}: {way_out}")
    _refuse_outside("input_ids", ids, "target", tokens_known(model))


def _refuse_outside(name: str, ids: torch.Tensor, owner: str, size: int) -> None:
    """Raise `ValueError` for token ids outside a vocabulary of size `size`."""
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= size:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"{name}: token {outside} is outside the {owner}'s vocabulary of {size}")


def refuse_types(model: PreTrainedModel, types: torch.Tensor | None) -> None:
    """Raise `ValueError` for `token_type_ids` of a text that a model reads;
    vision models need none for text, where all are 0."""
    reads = "token_type_ids" in _parameters(type(base_of(model)).forward) and not is_multimodal(model)
    if types is not None and (reads or bool(types.any())):
        name = type(base_of(model)).__name__
        raise ValueError(
            f"token_type_ids: {name} reads them, which this loop does not: leave them or lossy_policy out"
        )


def refuse_mask(ids: torch.Tensor, mask: torch.Tensor | None, name: str) -> None:
    """Raise `ValueError` for a mask (B, width) that does not match the prompt `ids`."""
    if mask is None:
        return
    if mask.shape != ids.shape:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}: they must agree")
    hidden = mask == 0
    # One device sync for both, (2, B).
    whole, neither = torch.stack([hidden.all(dim=1), (~hidden & (mask != 1)).any(dim=1)]).tolist()
    if any(neither):
        raise ValueError(f"{name}: expected 1 for a token and 0 for one that does not count, got other numbers")
    if any(whole):
        raise ValueError(f"{name} hides all of row {whole.index(True)}: every row needs a token")


def mask_name(model: PreTrainedModel) -> str:
    """Return the name of the text's mask: in an encoder-decoder, `attention_mask` is for the encoder's input."""
    return "decoder_attention_mask" if base_of(model).config.is_encoder_decoder else "attention_mask"


def refuse_positions(input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
    """Raise `ValueError` for positions (…, B, width) that do not count 0, 1, … over the visible tokens, as models on
    rows do."""
    if positions is None:
        return
    seen = torch.ones_like(input_ids) if mask is None else mask.ne(0).long().to(input_ids.device)
    fits = positions.shape[-1] == input_ids.shape[1]
    if not fits or not bool(((positions.to(input_ids.device) == seen.cumsum(dim=1) - 1) | (seen == 0)).all()):
        raise ValueError("lossy_policy works positions out from attention_mask, got others: leave position_ids out")


# -- more than text ---------------------------------------------------------------------------------------------------


def find_other_inputs(kwargs: Mapping[str, object], config: GenerationConfig) -> dict[str, object]:
    """Return the caller's non-text inputs of a model, by name."""
    settings = GENERATE | EXTRA_NAMES | TEXT_INPUTS | vars(config).keys()
    return {name: value for name, value in kwargs.items() if value is not None and name not in settings}


def find_non_text(inputs: Mapping[str, object], *ignored: str) -> list[str]:
    """Return the names of the non-text inputs of a model, but for the `ignored`."""
    return [
        name
        for name, value in inputs.items()
        # `generate` passes `mm_encoder_outputs` to every multimodal model, empty for text.
        if name not in (*TEXT_INPUTS, *ignored)
        and value is not None
        and not (isinstance(value, dict) and all(entry is None for entry in value.values()))
    ]


def refuse_extra_inputs(inputs: Mapping[str, object], *ignored: str) -> None:
    """Raise `ValueError` for non-text inputs, such as images, of a model that runs on a `RowCache`."""
    for name in find_non_text(inputs, *ignored):
        raise ValueError(f"lossy_policy handles text alone, the model got {name}: leave {name} or lossy_policy out")
