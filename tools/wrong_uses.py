"""Wrong uses, and the one line that each gets: names, types, shapes, devices, vocabularies and values.

Run `python tools/wrong_uses.py` (for heads, judges and profiles: `wrong_policies.py`). It exits with 1 if a wrong use is accepted, or is refused in
more than one line. Nothing is downloaded: the models are random and tiny.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from refused import main
from right_use import (
    SIZES,
    VOCAB,
    Printer,
    broken,
    by_runner,
    draft,
    filled,
    generate,
    gpt2,
    ids,
    llama,
    mask,
    t5,
    target,
)
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlamaModel,
    StaticCache,
    SynthIDTextWatermarkingConfig,
)

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


CASES: dict[str, Callable[[], Any]] = {}


def case(name: str, call: Callable[[], Any]) -> None:
    assert name not in CASES, name
    CASES[name] = call


# Policies and their parts
case("unknown policy name", lambda: generate(lossy_policy="svipp"))
case("unknown parameter", lambda: generate(lossy_policy={"stop": {"name": "svip", "treshold": 1}}))
case("unknown entry", lambda: generate(lossy_policy={"stopp": "svip"}))
case("unknown stop", lambda: generate(lossy_policy={"stop": "entropy"}))
case("policy of a wrong type", lambda: generate(lossy_policy=0.3))
case("policy True", lambda: generate(lossy_policy=True))
case("policy given as a class", lambda: generate(lossy_policy=hla.SVIP))
case("policy folder that is not there", lambda: generate(lossy_policy="no/such/policy"))
case("policy text that is not JSON", lambda: generate(lossy_policy="{stop: svip}"))
case("policy with a stop for a rule", lambda: hla.LossyPolicy(rule=hla.SVIP()))  # type: ignore[arg-type]
case("SVIP(h=-1)", lambda: hla.SVIP(h=-1))
case("SVIP(h=nan)", lambda: hla.SVIP(h=float("nan")))
case("SVIP(form='x')", lambda: hla.SVIP(form="x"))  # type: ignore[arg-type]
case("SVIP(max_draft=2.5)", lambda: hla.SVIP(max_draft=2.5))  # type: ignore[arg-type]
case("Constant(0)", lambda: hla.Constant(0))
case("Confidence(2)", lambda: hla.Confidence(2))


def holes(rows: int) -> dict[str, torch.Tensor]:
    """Return prompts of a decoder whose second token is hidden."""
    prompts = torch.tensor([[0, 4, 5]]).expand(rows, -1)
    return {"decoder_input_ids": prompts, "decoder_attention_mask": torch.tensor([[1, 0, 1]]).expand(rows, -1)}


# Models
case("enable(object())", lambda: hla.enable(object()))
case("enable a model without a head", lambda: hla.enable(LlamaModel(LlamaConfig(vocab_size=VOCAB, **SIZES))))
case("no draft", lambda: generate(assistant_model=None))
case("draft given as a name", lambda: generate(assistant_model="org/draft"))
case("draft without a head", lambda: generate(assistant_model=LlamaModel(LlamaConfig(vocab_size=VOCAB, **SIZES))))
case("draft of another vocabulary", lambda: generate(assistant_model=llama(vocab=60)))
case("draft and prompt lookup", lambda: generate(prompt_lookup_num_tokens=3))
case("decoder-only target, encoder-decoder draft", lambda: generate(assistant_model=t5()))
case(
    "batch of an encoder-decoder, holes in its decoder's prompts",
    lambda: generate(t5(), input_ids=ids(2), assistant_model=t5(), **holes(2)),
)
case("NaN weights in the target", lambda: generate(hla.enable(broken(target())), input_ids=ids(3)))
case("NaN weights in the draft", lambda: generate(assistant_model=broken(draft()), input_ids=ids(3)))
case("Runner for a policy that is none", lambda: hla.Runner("svipp", draft()))
case("Runner without a draft", lambda: draft().generate(ids(), max_new_tokens=4, custom_generate=hla.Runner("svip")))
case("Runner, num_beams=4", lambda: by_runner(num_beams=4))
case("Runner, output_attentions", lambda: by_runner(output_attentions=True, return_dict_in_generate=True))
case("Transformers' loop for a policy that is none", lambda: hla.in_transformers_loop(draft(), "svipp").__enter__())

case("target on meta", lambda: generate(hla.enable(llama().to("meta"))))
case("draft on meta", lambda: generate(assistant_model=llama().to("meta")))
case("GPT-2 past its positions", lambda: generate(gpt2(16), assistant_model=gpt2(16), max_new_tokens=20))
case("a prompt past GPT-2's positions", lambda: generate(gpt2(8), assistant_model=gpt2(8), input_ids=ids(2, 9)))
case("companion of a wrong type", lambda: generate(lossy_policy=hla.LossyPolicy(filter=hla.Staged(3))))
case("streamer given as a number", lambda: generate(streamer=3))
case(
    "prompt lookup with a stop that reads a draft",
    lambda: generate(assistant_model=None, prompt_lookup_num_tokens=3, lossy_policy="svip"),
)

# Inputs
case("both names of the prompt", lambda: generate(inputs=ids()))
case(
    "a cache of encoder-decoders",
    lambda: generate(**{CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())}),
)
case("embeddings of another width", lambda: generate(input_ids=..., inputs_embeds=torch.zeros(1, 6, 15)))
case("embeddings and more ids", lambda: generate(input_ids=ids(1, 7), inputs_embeds=torch.zeros(1, 6, 16)))
case("no input at all", lambda: generate(input_ids=...))
case("ids given as a list", lambda: generate(input_ids=[[4, 5, 6]]))
case("1-D ids", lambda: generate(input_ids=ids()[0]))
case("float ids", lambda: generate(input_ids=ids().float()))
case("an empty prompt", lambda: generate(input_ids=ids()[:, :0]))
case("token outside the vocabulary", lambda: generate(input_ids=ids() + VOCAB))
case("negative token", lambda: generate(input_ids=ids() - 5))
case("ids on another device", lambda: generate(input_ids=ids().to("meta")))
case("mask on another device", lambda: generate(attention_mask=torch.ones(1, 6).to("meta")))
case("mask of another shape", lambda: generate(attention_mask=torch.ones(1, 5, dtype=torch.long)))
case("mask of four dimensions", lambda: generate(attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool)))
case("mask given as a list", lambda: generate(attention_mask=[[1, 1, 1, 1, 1, 1]]))
case("mask that hides a whole row", lambda: generate(**mask([1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0])))
case("pixel values for a text model", lambda: generate(pixel_values=torch.zeros(1, 3, 8, 8)))
case("encoder-decoder: ids given as a list", lambda: generate(t5(), input_ids=[[4, 5]], assistant_model=t5()))
case(
    "encoder-decoder: token outside the vocabulary",
    lambda: generate(t5(), input_ids=ids() + VOCAB, assistant_model=t5()),
)

# Settings
VALUES: dict[str, Any] = {
    "use_mtp": True, "speculation_type": "dflash", "penalty_alpha": 0.6, "dola_layers": "high", "num_beam_groups": 2,
    "diversity_penalty": 0.5, "constraints": [object()], "force_words_ids": [[5]], "is_assistant": True,
    "assistant_ensemble_weight": 0.5, "min_new_tokens": "9", "no_repeat_ngram_size": 1.5,
    "encoder_no_repeat_ngram_size": "2", "bos_token_id": "a",
    "encoder_repetition_penalty": "a",
    "eos_token_id": "</s>", "forced_eos_token_id": "</s>", "suppress_tokens": "a", "begin_suppress_tokens": 3,
    "bad_words_ids": 3, "sequence_bias": 3, "prefix_allowed_tokens_fn": 3, "logits_processor": 3, "stopping_criteria": 3,
    "stop_strings": 3, "assistant_early_exit": "1",
}  # fmt: skip
for setting, value in VALUES.items():
    plain = value if isinstance(value, int | float | str) else "…"
    case(f"{setting}={plain!r}", partial(generate, **{setting: value}))
case("num_assistant_tokens=0", lambda: generate(num_assistant_tokens=0))
case("num_assistant_tokens='five'", lambda: generate(num_assistant_tokens="five"))
case("assistant_confidence_threshold=2", lambda: generate(assistant_confidence_threshold=2))
case("num_assistant_tokens_schedule='x'", lambda: generate(num_assistant_tokens_schedule="x"))
case("two draft stops", lambda: generate(lossy_policy="svip", assistant_confidence_threshold=0.4))
case("unknown setting", lambda: generate(max_new_token=5))
case("num_beams=4", lambda: generate(num_beams=4))
case("num_return_sequences=3, greedy", lambda: generate(num_return_sequences=3))
case("cache_implementation='quantized'", lambda: generate(cache_implementation="quantized"))
case("compile_config='fast'", lambda: generate(compile_config="fast"))
case("a small StaticCache", lambda: generate(**{CACHE: filled(StaticCache(draft().config, max_cache_len=4))}))
case("a cache and a batch", lambda: generate(input_ids=ids(2), **{CACHE: filled(DynamicCache())}))
case("a cache longer than the text", lambda: generate(input_ids=ids()[:, :2], **{CACHE: filled(DynamicCache())}))
case("a cache given as a tuple", lambda: generate(**{CACHE: ((torch.zeros(1), torch.zeros(1)),)}))
case("temperature=0", lambda: generate(do_sample=True, temperature=0))
case("temperature='hot'", lambda: generate(do_sample=True, temperature="hot"))
case("top_k=-1", lambda: generate(do_sample=True, top_k=-1))
case("min_p=2", lambda: generate(do_sample=True, min_p=2.0))
case("typical_p=0", lambda: generate(do_sample=True, typical_p=0.0))
case("repetition_penalty=-1", lambda: generate(repetition_penalty=-1.0))
case("max_new_tokens=0", lambda: generate(max_new_tokens=0))
case("max_new_tokens=-3", lambda: generate(max_new_tokens=-3))
case("max_new_tokens=2.5", lambda: generate(max_new_tokens=2.5))
case("max_length within the prompt", lambda: generate(max_new_tokens=None, max_length=6))
case("generation_config given as a dict", lambda: generate(generation_config={"max_new_tokens": 4}))
case("output_attentions", lambda: generate(output_attentions=True, return_dict_in_generate=True))
case("output_hidden_states", lambda: generate(output_hidden_states=True, return_dict_in_generate=True))
case("guidance_scale=2", lambda: generate(guidance_scale=2.0))
case("token_healing", lambda: generate(token_healing=True))
case(
    "a watermark that remembers its calls, for several rows",
    lambda: generate(input_ids=ids(2, 6), watermarking_config=SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)),
)
case("custom_generate and a policy", lambda: generate(custom_generate=hla.Runner("svip", draft())))
case("prompt_lookup_num_tokens=0", lambda: generate(assistant_model=None, prompt_lookup_num_tokens=0))
case("streamer, a batch", lambda: generate(input_ids=ids(2), streamer=Printer()))
case("stop_strings without a tokenizer", lambda: generate(stop_strings=["end"]))


if __name__ == "__main__":
    sys.exit(main(CASES))
