"""Arguments of `generate` with a policy, from its signature, the generation config and this package, alone and together."""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE

from .models import FAMILIES, VOCAB, checked, pair, prompts, short, tokenizer
from .values import Make, Random, always, junk, shown
from .verdicts import Case


class Silent(BaseStreamer):
    def put(self, value: Any) -> None:
        pass

    def end(self) -> None:
        pass


# Values that mean something; every other argument gets values that mean nothing.
MEANT: dict[str, list[Any]] = {
    "max_new_tokens": [1, 2, 7, 12, 10**9], "max_length": [3, 12, 20, 10**9], "min_length": [0, 5, 12], "min_new_tokens": [0, 3, 8],
    "do_sample": [False, True], "num_beams": [1, 2], "num_beam_groups": [1, 2], "temperature": [0.5, 1.0, 1.7],
    "top_k": [0, 1, 5, 1000], "top_p": [0.3, 0.9, 1.0], "min_p": [0.0, 0.1], "typical_p": [0.5, 1.0], "top_h": [0.4],
    "epsilon_cutoff": [0.0, 0.001], "eta_cutoff": [0.0, 0.001], "repetition_penalty": [0.8, 1.0, 1.3],
    "no_repeat_ngram_size": [0, 1, 2], "encoder_no_repeat_ngram_size": [0, 2], "encoder_repetition_penalty": [1.0, 1.2],
    "bad_words_ids": [[[5]], [[6, 7], [8]], [[VOCAB]]], "sequence_bias": [{(5,): 2.0}, [[[5, 6], -3.0]]],
    "suppress_tokens": [[4, 5, 6], [3]], "begin_suppress_tokens": [[7, 8]], "forced_bos_token_id": [5],
    "forced_eos_token_id": [3, [3, 4]], "eos_token_id": [3, 40, [3, 5, 9], 200], "pad_token_id": [0, 1, 200], "bos_token_id": [2],
    "remove_invalid_values": [True], "renormalize_logits": [True], "exponential_decay_length_penalty": [(3, 1.5)],
    "guidance_scale": [1.0, 1.5], "return_dict_in_generate": [True, False], "output_scores": [True], "output_logits": [True],
    "output_attentions": [False, True], "output_hidden_states": [False, True], "use_cache": [True, False],
    "num_return_sequences": [1, 2], "stop_strings": ["w5", ["w5", "w6 w7"], "zz"], "max_time": [100.0, 1e9],
    "num_assistant_tokens": [1, 3, 20], "num_assistant_tokens_schedule": ["constant", "heuristic", "heuristic_transient"],
    "assistant_confidence_threshold": [0.0, 0.4], "prompt_lookup_num_tokens": [2], "assistant_early_exit": [1],
    "lossy_policy": ["strict", "svip", {"rule": "block_verification"}, "heuristic", "joint_goodput", {"stop": {"name": "constant", "gamma": 9}}],
    "penalty_alpha": [0.6], "dola_layers": ["low"], "diversity_penalty": [0.5], "length_penalty": [1.0, 2.0], "early_stopping": [False, True],
    "cache_implementation": ["dynamic", "static", "quantized"], "low_memory": [False, True], "synced_gpus": [False, True],
    "is_assistant": [False, True], "disable_compile": [True], "token_healing": [False, True], "prefill_chunk_size": [2],
    "trust_remote_code": [False, True], "logits_to_keep": [1],
}  # fmt: skip
MADE: dict[str, list[Make]] = {
    "logits_processor": [lambda: LogitsProcessorList([MinLengthLogitsProcessor(9, 3)]), LogitsProcessorList, list],
    "stopping_criteria": [lambda: StoppingCriteriaList([MaxLengthCriteria(11)]), lambda: [MaxLengthCriteria(40)], short],
    "prefix_allowed_tokens_fn": [lambda: lambda row, ids: list(range(4, 40)), lambda: lambda row, ids: []],
    "streamer": [Silent], "tokenizer": [tokenizer], "assistant_tokenizer": [tokenizer],
    "assistant_model": [lambda: pair("llama")[1], lambda: pair("gpt2")[1], lambda: pair("t5")[1]],
    CACHE: [DynamicCache], "watermarking_config": [WatermarkingConfig, lambda: SynthIDTextWatermarkingConfig([1], 3)],
    "generation_config": [lambda: GenerationConfig(max_new_tokens=6), lambda: GenerationConfig(lossy_policy="svip", do_sample=False)],
    "custom_generate": [lambda: hla.Runner("svip", pair()[1])],
    "position_ids": [lambda: torch.arange(4)[None]], "token_type_ids": [lambda: torch.zeros(1, 4, dtype=torch.long)],
    "inputs_embeds": [lambda: torch.zeros(1, 4, 16, dtype=torch.float64)],
    "encoder_outputs": [lambda: (torch.zeros(1, 4, 16, dtype=torch.float64),)],
}  # fmt: skip
# Of which a value is neither right nor wrong to compare: other code is named, or nothing but time decides.
LEFT_OUT = {
    "self",
    "kwargs",
    "inputs",
    "transformers_version",
    "max_time",
    "compile_config",
    "continuous_batching_config",
}
EXTRA = ("position_ids", "token_type_ids", "inputs_embeds", "encoder_outputs", CACHE, "labels", "logits_to_keep",
         "decoder_input_ids", "cross_attn_head_mask", "max_new_token", "temprature", "do\nsample", "trust_remote_code")  # fmt: skip


def names() -> list[str]:
    """Return every argument of `generate`."""
    known = (
        set(inspect.signature(GenerationMixin.generate).parameters)
        | set(vars(GenerationConfig()))
        | {*MEANT, *MADE, *EXTRA}
    )
    return sorted(name for name in known - LEFT_OUT if not name.startswith("_"))


def draw_value(name: str, random: Random, meant: float) -> Make:
    """Return a value of this argument, a meaningful one with probability `meant`."""
    makes = [*map(always, MEANT.get(name, ())), *MADE.get(name, ())]
    return random.choice(makes) if makes and random.random() < meant else junk(random)


def case(random: Random, folder: Path) -> Case:
    family = random.choices(FAMILIES, (6, 2, 2))[0]
    meant = random.choice([0.0, 0.5, 0.9, 1.0])  # 1: a combination of values that are right by themselves
    chosen = random.sample(names(), random.choice([1, 1, 2, 3, 5]))
    makes = {name: draw_value(name, random, meant) for name in chosen}
    inputs = prompts(random, random.choice([1, 1, 3]) if family != "t5" else 1)
    through = random.choice(["call", "call", "config", "model"])

    def build() -> dict[str, Any]:
        base = {"max_new_tokens": 8, "do_sample": False, "stopping_criteria": short()} | inputs
        return base | {name: make() for name, make in makes.items()}

    what = f"{family}, {inputs['input_ids'].shape[0]} rows, by {through}: " + ", ".join(
        f"{name}={shown(make())}" for name, make in makes.items()
    )
    return Case(what, lambda: _call(family, build, through))


def _call(family: str, build: Callable[[], dict[str, Any]], through: str) -> None:
    settings = [name for name in vars(GenerationConfig()) if not name.startswith("_")]

    def by_config() -> dict[str, Any]:
        given = build()
        config = given.get("generation_config")
        if config is None:
            config = given["generation_config"] = GenerationConfig()
        if isinstance(config, GenerationConfig):
            for name in settings:
                if name in given:
                    setattr(config, name, given.pop(name))
        return given

    if through != "model":
        return checked(family, build if through == "call" else by_config)
    model, given = pair(family)[0], build()
    config = model.generation_config
    model.generation_config = copy.deepcopy(config)
    inside = [name for name in settings if name in given]
    for name in inside:
        setattr(model.generation_config, name, given[name])
    try:
        checked(family, lambda: {name: value for name, value in build().items() if name not in inside})
    finally:
        model.generation_config = config
