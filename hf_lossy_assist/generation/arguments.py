"""All arguments and settings of Transformers' `generate`, their status in a call with a policy, and checks of their values.

`tools/arguments_page.py` writes docs/arguments.md from `ARGUMENTS`. A name that is new in a Transformers release is refused until listed here.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..models.compiled.compilation import STATIC
from ..validation import check_flag, check_int, check_number, shown


Check = Callable[[str, object], None]
# Synonyms for a cache that grows with the text, since Transformers infers the layer types from the model.
GROWING = (None, "dynamic", "hybrid", "hybrid_chunked", "sliding_window")
PAGED = "paged"  # at a call it selects another loop; in a config Transformers treats it as "dynamic"


# -- checks of values -----------------------------------------------------------------------------------------------------


def _plain(value: object) -> object:
    """Convert numbers of other libraries to Python's."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _whole(low: int, high: int = 2**31 - 1) -> Check:
    return lambda name, value: check_int(name, _plain(value), low, high)


def _number(low: float = float("-inf"), high: float = float("inf")) -> Check:
    return lambda name, value: check_number(name, _plain(value), low, high)


def _positive(name: str, value: object, high: float = float("inf"), way_out: str = "") -> None:
    """Raise `TypeError` or `ValueError` unless `value` is a number above 0 and up to `high`."""
    bound = "" if high == float("inf") else f" and up to {high:g}"
    line = f"{name}: expected a number above 0{bound}, got {shown(value)}{way_out}"
    try:
        check_number(name, _plain(value), 0.0, high)
    except (TypeError, ValueError) as error:
        raise type(error)(line) from None
    if value == 0:
        raise ValueError(line)


def _expect(expected: str, fits: Callable[[object], bool]) -> Check:
    def check(name: str, value: object) -> None:
        if not fits(value):
            raise TypeError(f"{name}: expected {expected}, got {shown(value)}")

    return check


def _are_ids(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype in (torch.int64, torch.int32) and value.dim() < 2 and value.device.type != "meta"
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(v, Integral) and not isinstance(v, bool) and -(2**63) <= int(v) < 2**63 for v in values)


def _all(value: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(fits, value))


_id = _expect("one token id", lambda value: not isinstance(value, list | tuple) and _are_ids(value))
_ids = _expect("a token id or a list of them", _are_ids)
_list = _expect("a list of token ids", lambda value: isinstance(value, list | tuple | torch.Tensor))
_bias = _expect("a dict from tuples of token ids to numbers", lambda value: isinstance(value, dict | list))
_texts = _expect(
    "a text or a list of texts", lambda value: isinstance(value, str) or _all(value, lambda v: isinstance(v, str))
)
_function = _expect("a function of a row's number and its token ids", callable)
check_functions = _expect("a list of functions of (input_ids, scores)", lambda value: _all(value, callable))
_watermark = _expect(
    "a WatermarkingConfig", lambda value: isinstance(value, dict) or hasattr(value, "construct_processor")
)
_above_zero = partial(_positive, way_out="; for greedy decoding pass do_sample=False")
_share = partial(_above_zero, high=1.0)
_ngram = _whole(0, 10_000)  # Transformers makes a list of this many slices for every token


# -- the table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Arguments with a common remark.

    Args:
        checks: for each name, a function that raises for an invalid value; None: Transformers checks it.
        remark: for docs/arguments.md.
        asks: for refused settings: whether a value requests the unsupported feature.
        off: a value that does not request it.
        way_out: an alternative to omitting the setting.
    """

    checks: Mapping[str, Check | None]
    remark: str = ""
    asks: Callable[[object], bool] | None = None
    off: object = None
    way_out: str = ", or leave lossy_policy out"


def _row(names: str, remark: str = "", **checks: Check) -> Row:
    """Return a row with `names`, which have no check, and the names in `checks`."""
    return Row(dict.fromkeys(names.split()) | checks, remark)


def _refused(
    remark: str, asks: Callable[[object], bool], off: object = None, way_out: str | None = None, **checks: Check | None
) -> Row:
    return Row(checks, remark, asks, off, Row.way_out if way_out is None else way_out)


def _above(low: float) -> Callable[[object], bool]:
    return lambda value: value is not None and not (isinstance(value, int | float) and value <= low)


def _given(value: object) -> bool:
    return value is not None


HONOURED, REFUSED, WITHOUT_EFFECT = "Honoured", "Refused", "Without effect"
# Checked only if the call samples.
SAMPLING = _row(
    "",
    "applied once to each model's logits",
    temperature=_above_zero,
    top_k=_whole(0),
    top_p=_share,
    min_p=_number(0.0, 1.0),
    typical_p=_share,
)
ARGUMENTS: dict[str, tuple[Row, ...]] = {
    HONOURED: (
        _row(
            "inputs generation_config kwargs",
            "`kwargs` are settings, and the model's own inputs; a cache is `cache`, or what a Transformers before 5.24 calls it",
        ),
        _row(
            "", "called as `generate` calls them for one row; one object for several rows must keep nothing",
            logits_processor=check_functions, prefix_allowed_tokens_fn=_function,
        ),
        _row(
            "",
            "called as in `generate`: once for each token, with all rows; it gets scores if `output_scores` stores them",
            stopping_criteria=check_functions,
        ),
        _row(
            "assistant_model streamer",
            'a streamer takes one row',
        ),
        _row(
            "max_new_tokens", "`max_time` is checked once a round; `stop_strings` needs `tokenizer=`",
            max_length=_whole(1), min_length=_whole(0), min_new_tokens=_whole(0), max_time=_number(0.0), stop_strings=_texts,
        ),
        _row("", eos_token_id=_ids, pad_token_id=_id, bos_token_id=_ids, decoder_start_token_id=_ids),
        _row("", do_sample=check_flag),
        SAMPLING,
        _row("", SAMPLING.remark, top_h=_number(0.0, 1.0), epsilon_cutoff=_number(0.0, 1.0), eta_cutoff=_number(0.0, 1.0)),
        _row(
            "", repetition_penalty=_positive, encoder_repetition_penalty=_number(0.0),
            no_repeat_ngram_size=_ngram, encoder_no_repeat_ngram_size=_ngram,
        ),
        _row(
            "", bad_words_ids=_list, suppress_tokens=_list, begin_suppress_tokens=_list, sequence_bias=_bias,
            forced_bos_token_id=_whole(0), forced_eos_token_id=_ids,
        ),
        _row(
            "exponential_decay_length_penalty", "SynthID's watermark has state: one row only",
            renormalize_logits=check_flag, remove_invalid_values=check_flag, watermarking_config=_watermark,
        ),
        _row("", "with sampling", num_return_sequences=_whole(1)),
        _row("", return_dict_in_generate=check_flag, output_scores=check_flag, output_logits=check_flag),
        _row("", "the loop has a cache of its own; with `False` the output holds none", use_cache=check_flag),
        _row(
            "", "the most tokens of each row in one forward of a prompt; a prompt with images or embeddings, for a drafter on the target's hidden states, or under RoPE "
            "that changes with the length is read in one",
            prefill_chunk_size=_whole(1),
        ),
        _row(
            "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold",
            "if the policy has no stop (with a stop, `num_assistant_tokens` is its longest draft). Sources in order: the call; a `generation_config` of the call, unless the "
            'value is Transformers\' default (20, "constant", 0.4) or that of the target\'s own config; the draft\'s generation config. As in Transformers, the target\'s '
            "own config is not read",
        ),
        _row(
            "prompt_lookup_num_tokens", "a match is the latest one, of up to 64 tokens; an early exit is `assistant_model=hla.early_exit(model, n)`",
            max_matching_ngram_size=_whole(1), assistant_early_exit=_whole(1),
        ),
        _row(
            "speculation_type",
            "the checkpoint's multi-token prediction layers draft, at batch 1; DFlash models of Transformers' own are refused: `load_drafter` reads those of others",
            use_mtp=check_flag,
        ),
        _row(
            "cache_implementation compile_config",
            '"static" or a `CompileConfig` requests [compiled rounds](how-to/compile.md), which Transformers before 5.24 refuses with a draft; "dynamic", "hybrid", '
            '"hybrid_chunked", "sliding_window", and "paged" in a generation config, have no effect; offloaded and quantised caches are refused',
            disable_compile=check_flag,
        ),
        _row(
            "", "as in Transformers: automatic if FSDP2 [shards the target](how-to/processes.md) over several processes; `True` is refused in a single process",
            synced_gpus=check_flag,
        ),
    ),
    REFUSED: (
        _refused("beam search", _above(1), 1, num_beams=_whole(1)),
        _refused("group beam search", _above(1), num_beam_groups=None),
        _refused("group beam search", _above(0), diversity_penalty=_number()),
        _refused("constrained beam search", _given, constraints=None, force_words_ids=None),
        _refused("contrastive search", _above(0), penalty_alpha=_number()),
        _refused("DoLa", _given, dola_layers=None),
        _refused("classifier-free guidance", lambda value: (value or 1) != 1, 1.0, guidance_scale=_number()),
        _refused("Transformers' own lossy rule", _given, assistant_ensemble_weight=_number()),
        _row("custom_generate", "another decoding loop"),
        _refused(
            "with the word timestamps of Whisper (a pipeline's return_timestamps=\"word\"), made of attentions", bool, False,
            return_token_timestamps=check_flag,
        ),
        _refused(
            "with outputs of this kind", bool, False, ", or run the finished text through the model once",
            output_attentions=check_flag, output_hidden_states=check_flag,
        ),
        _refused("token healing", bool, False, "", token_healing=check_flag),
        _refused("as the draft of Transformers' own assisted generation", bool, is_assistant=check_flag),
    ),
    WITHOUT_EFFECT: (
        _row("negative_prompt_ids negative_prompt_attention_mask", "classifier-free guidance only"),
        _row("early_stopping length_penalty", "beam search only"),
        _row("", "contrastive search only", low_memory=check_flag),
        _row("cache_config", "quantised caches only"),
        _row(
            "", "a draft with another tokenizer re-tokenizes a fixed window",
            assistant_lookbehind=_whole(1), target_lookbehind=_whole(1),
        ),
        _row("max_cache_len", "the cache grows with the sequence"),
        _row("continuous_batching_config", "`generate_batch` only"),
        _row("transformers_version", "a note in the file"),
    ),
}  # fmt: skip
CHECKS = {name: check for rows in ARGUMENTS.values() for row in rows for name, check in row.checks.items()}
# `OFF`: neutral values of refused settings. `UNKNOWN`: settings of a newer Transformers release, with their defaults.
OFF = {name: row.off for row in ARGUMENTS[REFUSED] for name in row.checks}
UNKNOWN = {name: value for name, value in vars(GenerationConfig()).items() if name[0] != "_" and name not in CHECKS}


# -- a call's settings ----------------------------------------------------------------------------------------------------


class Settings:
    """The generation settings of a call, completed by a generation config.

    `model_config`: the model's generation config, if `config` was prepared by `generate` and contains the call's settings.
    """

    def __init__(
        self, kwargs: Mapping[str, object], config: GenerationConfig, model_config: GenerationConfig | None = None
    ):
        self.kwargs, self.config, self.model_config = kwargs, config, model_config

    def __getitem__(self, name: str) -> Any:
        return self.kwargs[name] if name in self.kwargs else getattr(self.config, name, None)

    def is_passed(self, name: str) -> bool:
        """Return whether the call passed the setting."""
        changed = self.model_config is not None and self[name] != getattr(self.model_config, name, None)
        return name in self.kwargs or changed

    def way_out(self, name: str, off: object) -> str:
        """Return the advice for removing a setting: omit it, or override the model's config (FSMT's, for example, has five beams)."""
        if self.is_passed(name):
            return f"leave {name} out"
        return (
            f"the generation config has it, so pass {name}={off!r}, on the command line --set {name}={json.dumps(off)}"
        )


def check_config(given: object) -> None:
    """Raise `TypeError`, one line, if `generation_config=` is no `GenerationConfig`."""
    if given is not None and not isinstance(given, GenerationConfig):
        raise TypeError(f"generation_config: expected a GenerationConfig, got {type(given).__name__}")


def check_types(settings: Settings) -> None:
    """Raise `TypeError` or `ValueError`, one line, for a setting of the wrong type or out of range; None means unset."""
    for name, check in CHECKS.items():
        value = settings[name]
        if value is None or check is None or (name in SAMPLING.checks and not settings["do_sample"]):
            continue
        try:
            check(name, value)
        except (TypeError, ValueError) as error:
            if name in settings.kwargs:
                raise
            raise type(error)(f"{error}: {settings.way_out(name, OFF.get(name))}") from None


def refuse_modes(settings: Settings) -> None:
    """Raise `ValueError` for decoding modes that this loop does not support, in the call or in a prepared generation config."""
    for row in ARGUMENTS[REFUSED]:
        for name in row.checks:
            if row.asks is not None and row.asks(settings[name]):
                raise ValueError(
                    f"lossy_policy does not run {row.remark}, which {name}={shown(settings[name])} asks for: "
                    f"{settings.way_out(name, row.off)}{row.way_out}"
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


def refuse_config(model: PreTrainedModel) -> None:
    """Raise `ValueError`, one line, for unsupported modes in the model's generation config, before the first call."""
    refuse_modes(Settings({}, model.generation_config, model.generation_config))
