"""Spread a target over ranks by tensor parallelism, with the whole draft on each: the output is the same on every rank.

    torchrun --nproc-per-node 2 examples/multi_gpu/tensor_parallel.py                        # a small random Llama, on the CPU
    torchrun --nproc-per-node 8 examples/multi_gpu/tensor_parallel.py --model M --assistant D --prompt "Why is the sky blue?" --policy svip

A random Llama generates nonsense; the example shows that it equals the nonsense of one process.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_lossy_assist as hla


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target: a path or Hub id")
    parser.add_argument("--assistant", help="draft: a path or Hub id")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--policy", default="svip")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    dist.init_process_group(None if torch.accelerator.is_available() else "gloo")
    first = dist.get_rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            args.model, args.assistant = random_pair(Path(folder), first)
        target = AutoModelForCausalLM.from_pretrained(args.model, tp_plan="auto", dtype="auto").eval()
        draft = AutoModelForCausalLM.from_pretrained(args.assistant, dtype="auto").to(target.device).eval()
        inputs = encode_prompt(args, target.device)
        out = hla.enable(target).generate(
            **inputs, assistant_model=draft, lossy_policy=args.policy, do_sample=False, max_new_tokens=args.max_new_tokens,
            return_dict_in_generate=True,
        )  # fmt: skip
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, out.sequences.tolist())
    assert all(text == texts[0] for text in texts), "ranks wrote different texts"
    if first:
        print(f"{len(texts)} ranks, one text: {texts[0][0]}\n{out.speculation}")
    dist.destroy_process_group()


def random_pair(folder: Path, first: bool) -> tuple[str, str]:
    """Return the folder of a Llama whose sizes two or four ranks can share, and of a smaller one, saved by the first rank."""
    box = [str(folder)]
    dist.broadcast_object_list(box)
    names = tuple(str(Path(box[0], name)) for name in ("target", "draft"))
    if first:
        torch.manual_seed(0)
        for name, layers in zip(names, (6, 1), strict=True):
            sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
            LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, eos_token_id=None)).save_pretrained(name)
    dist.barrier()
    return names[0], names[1]


def encode_prompt(args: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the prompt's tokens; a few numbers if the models have no tokenizer."""
    if os.path.isdir(args.model) and not os.path.exists(os.path.join(args.model, "tokenizer_config.json")):
        ids = torch.arange(5, 17)[None]
        return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}
    return dict(AutoTokenizer.from_pretrained(args.model)(args.prompt, return_tensors="pt").to(device))


if __name__ == "__main__":
    main()
