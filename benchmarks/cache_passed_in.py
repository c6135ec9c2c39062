"""What a call costs whose cache the caller passes in: memory, seconds, and forwards with gradients on.

    python benchmarks/cache_passed_in.py [--max-new-tokens 300] [--how cache|t5]

One call in a process of its own, so that the peak is the call's: a conversation's second turn of the demo pair (`cache`), or a random
encoder-decoder of 10 million parameters and a noisy copy of it (`t5`). No forward may record gradients: each would keep its states as
long as the cache lives. The peak is the process's (`ru_maxrss`), on Linux alone.
"""

import argparse
import copy
import resource
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, T5Config, T5ForConditionalGeneration

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.models.cache_name import CACHE


def conversation() -> tuple[Any, Any, dict[str, Any]]:
    """Target, draft and a call with an empty cache that the caller keeps."""
    target, draft = (AutoModelForCausalLM.from_pretrained(demo.FOLDER / name).eval() for name in ("target", "draft"))
    prompt = torch.arange(4, 44)[None] % target.config.vocab_size
    return target, draft, {"input_ids": prompt, CACHE: DynamicCache(config=target.config)}


def encoder_decoder() -> tuple[Any, Any, dict[str, Any]]:
    torch.manual_seed(0)
    config = T5Config(vocab_size=2000, d_model=256, d_ff=1024, num_layers=4, num_heads=4, decoder_start_token_id=0)
    target = T5ForConditionalGeneration(config).eval()
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.05 * weight.std() * torch.randn_like(weight))
    return target, draft, {"input_ids": torch.arange(4, 44)[None]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=300)
    parser.add_argument("--how", choices=("cache", "t5"), default="cache")
    args = parser.parse_args()
    target, draft, inputs = conversation() if args.how == "cache" else encoder_decoder()
    grads: list[bool] = []
    for model in (target, draft):
        model.register_forward_pre_hook(lambda *_: grads.append(torch.is_grad_enabled()))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, (time.perf_counter(), time.process_time())
    out = hla.enable(target).generate(
        **inputs, assistant_model=draft, lossy_policy="strict", do_sample=False, return_dict_in_generate=True,
        max_new_tokens=args.max_new_tokens, min_new_tokens=args.max_new_tokens,
    )  # fmt: skip
    seconds, of_cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{args.how}: {out.sequences.shape[1]} tokens with the prompt, peak +{grown:.0f} MiB, {seconds:.1f} s ({of_cpu:.1f} s of CPU), "
        f"{sum(grads)} of {len(grads)} forwards with gradients"
    )


if __name__ == "__main__":
    main()
