"""What one generate call refuses: each thing in one line that says what was given, what was expected and the way out."""

import difflib
import inspect
import json
from typing import Any

import torch
from transformers import (
    Cache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
)

from ..models.compat import CACHE, CACHE_NAMES, passed_as
from ..models.distributed.sharded import is_one_of_several
from ..models.introspection import base_of, vocabulary_of
from ..models.multimodal import is_multimodal
from ..models.probe import why_not_rows
from ..validation import check_int, check_number, shown
from .arguments import refuse_modes_asked_for
from .compiling import STATIC
from .input_tensors import refuse_ids, refuse_mask, refuse_outside, refuse_prompt
from .passed_cache import refuse_uncroppable
from .setting_types import check_settings
from .text_inputs import TEXT_INPUTS, refuse_extra_inputs


# Names of one thing, for Transformers infers the kinds of layers from the model: a cache that grows with the text, and here a row each.
GROWING = (None, "dynamic", "hybrid", "hybrid_chunked", "sliding_window")
PAGED = "paged"  # another loop at the call; in a config Transformers reads it as "dynamic"
GENERATE = set(inspect.signature(GenerationMixin.generate).parameters)
# What `generate` takes beyond its signature, the generation config and the model's forward.
OTHERS = {
    "tokenizer",
    "assistant_tokenizer",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "trust_remote_code",
    *CACHE_NAMES,
}


class Settings:
    """A generation setting as the call has it, else as the generation config has it.

    `own`: the model's generation config, where `config` is what `generate` prepared, with the call's settings in it.
    """

    def __init__(self, kwargs: dict[str, Any], config: GenerationConfig, own: GenerationConfig | None = None):
        self.kwargs, self.config, self.own = kwargs, config, own

    def __getitem__(self, name: str) -> Any:
        return self.kwargs[name] if name in self.kwargs else getattr(self.config, name, None)

    def passed(self, name: str) -> bool:
        """Whether a setting came with the call."""
        return name in self.kwargs or (self.own is not None and self[name] != getattr(self.own, name, None))

    def way_out(self, name: str, neutral: Any) -> str:
        """How to be rid of a setting: leave it out, or where the model brought it (FSMT its five beams), say otherwise."""
        if self.passed(name):
            return f"leave {name} out"
        return f"the generation config has it, so pass {name}={neutral!r}, on the command line --set {name}={json.dumps(neutral)}"


def refuse_arguments(model: Any, kwargs: dict[str, Any], config: GenerationConfig) -> None:
    """Refuse what this loop cannot do, before Transformers prepares anything. Raises `ValueError` or `TypeError`."""
    settings = Settings(kwargs, config)
    ids = kwargs.get("inputs") if kwargs.get("inputs") is not None else kwargs.get("input_ids")
    _refuse_unknown(model, kwargs, config)
    check_settings(kwargs, config, settings.way_out)
    refuse_modes(kwargs, settings)
    _refuse_sampling(settings)
    if kwargs.get("inputs") is not None and kwargs.get("input_ids") is not None:
        raise ValueError("inputs and input_ids are two names of the prompt: pass one of them")
    decoder_only = not base_of(model).config.is_encoder_decoder
    begin = settings["bos_token_id"]
    if ids is None and decoder_only and (begin is None or isinstance(begin, list | tuple) or begin < 0):
        raise ValueError("there is no prompt, and the target has no BOS token to start from: pass input_ids=…")
    _refuse_tokens(model, ids, kwargs)
    if not (kwargs.get("logits_to_keep") is None or type(kwargs["logits_to_keep"]) is int):
        raise TypeError("lossy_policy decides which logits a forward computes: leave logits_to_keep out")
    if decoder_only:
        _refuse_other_inputs(model, kwargs, config)
        given_as = passed_as(kwargs)
        if given_as is not None and isinstance(kwargs[given_as], EncoderDecoderCache):
            raise TypeError(f"{given_as}: an EncoderDecoderCache is for encoder-decoders; pass a DynamicCache")
    if isinstance(ids, torch.Tensor) and model.main_input_name == "input_ids":
        refuse_mask(ids, kwargs.get("attention_mask"), decoder_only)
    _refuse_lengths(ids if decoder_only else None, settings)
    copies = settings["num_return_sequences"] or 1
    if kwargs.get("streamer") is not None and ids is not None and copies * len(ids) > 1:
        raise ValueError("a streamer serves one row; pass prompts one by one, or leave streamer out")


def _refuse_tokens(model: Any, ids: Any, kwargs: dict[str, Any]) -> None:
    """Refuse token ids that are none, or that the model has no embedding of."""
    if ids is not None and model.main_input_name == "input_ids":
        refuse_prompt(model, ids)
    for name in ("decoder_input_ids", "token_type_ids"):
        if kwargs.get(name) is not None:
            refuse_ids(name, kwargs[name])
    if kwargs.get("decoder_input_ids") is not None:
        refuse_outside("decoder_input_ids", kwargs["decoder_input_ids"], "decoder", vocabulary_of(model))


def _refuse_lengths(prompt: Any, settings: Settings) -> None:
    """Refuse lengths that leave nothing to generate; `prompt` is None where it does not count, as an encoder's."""
    new, limit = settings["max_new_tokens"], settings["max_length"]
    if prompt is not None and new is None and limit is not None and limit <= prompt.shape[1]:
        raise ValueError(
            f"max_length={limit} leaves no room behind a prompt of {prompt.shape[1]} tokens: pass max_new_tokens=…"
        )
    if new is not None:
        check_int("max_new_tokens", new, 1)


def _refuse_unknown(model: Any, kwargs: dict[str, Any], config: GenerationConfig) -> None:
    known = GENERATE | set(vars(config)) | OTHERS
    for call in (
        model.forward,
        model.prepare_inputs_for_generation,
        type(model).generate,
    ):  # Whisper's has arguments of its own
        known |= set(inspect.signature(call).parameters)
    known -= {"self", "kwargs", "args"}
    for name, value in kwargs.items():
        if name not in known and not name.startswith("decoder_") and value is not None:
            # `cache`: as newer ones than this Transformers call it.
            close = [CACHE] if name == "cache" else difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ": leave it out"
            raise TypeError(f"generate: this model takes no argument {shown(name)}{hint}")


def refuse_modes(kwargs: dict[str, Any], settings: Settings) -> None:
    """Refuse what this loop does not run, from the call's arguments or a prepared generation config alone."""
    if kwargs.get("custom_generate") is not None:
        raise ValueError("lossy_policy and custom_generate are both decoding loops: pass one of them")
    refuse_modes_asked_for(settings)
    if (settings["num_beams"] or 1) > 1:
        raise ValueError(
            f"lossy_policy decodes without beams, got num_beams={settings['num_beams']}: {settings.way_out('num_beams', 1)}"
        )
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("lossy_policy needs token ids: pass input_ids=… in place of inputs_embeds=…")
    if kwargs.get("position_ids") is not None:
        raise ValueError("lossy_policy works positions out from attention_mask, got position_ids: leave them out")
    for name in ("output_attentions", "output_hidden_states"):
        if settings[name]:
            raise ValueError(
                f"lossy_policy keeps no {name[7:]}: {settings.way_out(name, False)}, or run the finished text through the model once"
            )
    if kwargs.get("synced_gpus") and not is_one_of_several():
        raise ValueError("synced_gpus=True keeps several processes in step, and this is the only one: leave it out")
    if (settings["guidance_scale"] or 1) != 1:
        raise ValueError(
            f"lossy_policy does not run classifier-free guidance: {settings.way_out('guidance_scale', 1.0)}"
        )
    _refuse_caches(kwargs, settings)
    if settings["token_healing"]:
        raise ValueError(f"lossy_policy does not heal tokens: {settings.way_out('token_healing', False)}")
    if settings["assistant_ensemble_weight"] is not None:
        raise ValueError(
            f"assistant_ensemble_weight is Transformers' own lossy rule: {settings.way_out('assistant_ensemble_weight', None)}, or "
            "leave lossy_policy out"
        )


def refuse_config(model: Any) -> None:
    """Refuse what the model's own generation config asks for in every call, before the first; `ValueError`, one line."""
    refuse_modes({}, Settings({}, model.generation_config, model.generation_config))


def _refuse_caches(kwargs: dict[str, Any], settings: Settings) -> None:
    """Refuse to go without a cache, and caches that cannot be rolled back."""
    if settings["use_cache"] is False:
        if not settings.passed("use_cache"):  # MPT's config comes with it
            raise ValueError(
                "the generation config says use_cache=False, and lossy_policy needs the cache: on the command line --set use_cache=true, "
                "in Python pass use_cache=True"
            )
        raise ValueError("lossy_policy needs the key-value cache, got use_cache=False: leave it out")
    known = (*GROWING, STATIC) if settings.passed("cache_implementation") else (*GROWING, STATIC, PAGED)
    if settings["cache_implementation"] not in known:
        raise ValueError(
            f"lossy_policy keeps its own cache, got cache_implementation={shown(settings['cache_implementation'])}: "
            f"{settings.way_out('cache_implementation', 'dynamic')}"
        )
    name = passed_as(kwargs)
    if name is None:
        return
    cache = kwargs[name]
    if not isinstance(cache, Cache):
        raise TypeError(f"{name}: expected a Cache such as DynamicCache, got {type(cache).__name__}")
    refuse_uncroppable(cache, name)


def _refuse_sampling(settings: Settings) -> None:
    copies = settings["num_return_sequences"]
    if copies is not None:
        check_int("num_return_sequences", copies, 1)
        if copies > 1 and not settings["do_sample"]:
            raise ValueError(
                f"num_return_sequences={copies} would be {copies} equal greedy texts: pass do_sample=True"
            )
    penalty = settings["repetition_penalty"]
    if penalty is not None and not (isinstance(penalty, int | float) and penalty > 0):
        raise ValueError(f"repetition_penalty: expected a number above 0, got {shown(penalty)}")
    if not settings["do_sample"]:
        return
    temperature = settings["temperature"]
    if temperature is not None and not (isinstance(temperature, int | float) and temperature > 0):
        raise ValueError(
            f"temperature: expected a number above 0, got {shown(temperature)}; for greedy decoding pass do_sample=False"
        )
    if settings["top_k"] is not None:
        check_int("top_k", settings["top_k"], 0)
    for name in ("top_p", "min_p", "typical_p"):
        if settings[name] is not None:
            check_number(name, settings[name], 0.0, 1.0)
    for name in ("top_p", "typical_p"):
        if settings[name] == 0:
            raise ValueError(
                f"{name}: expected a number above 0 and up to 1, got 0; for greedy decoding pass do_sample=False"
            )


def other_inputs(kwargs: dict[str, Any], config: GenerationConfig) -> dict[str, Any]:
    """What a caller gives a model beside text, by name."""
    settings = GENERATE | set(vars(config)) | OTHERS | TEXT_INPUTS
    return {name: value for name, value in kwargs.items() if value is not None and name not in settings}


def _refuse_other_inputs(model: Any, kwargs: dict[str, Any], config: GenerationConfig) -> None:
    """The same under the names that the caller used, before an image is encoded for nothing."""
    given = other_inputs(kwargs, config)
    if given and why_not_rows(model) is None and not is_multimodal(model):
        refuse_extra_inputs(given)
