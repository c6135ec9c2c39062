"""Helpers of the benchmarks of a pair: options, models and prompts, clock, machine's name, and the file of figures."""

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lossy_assist as hla
from hf_lossy_assist.tasks.prompts import read_prompts


sys.path.append(str(Path(__file__).parent.parent / "examples" / "reproduce"))
from regimes import add_noise, widen


def options(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark of a pair; `defaults`: this benchmark's, by option."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target: a path or Hub id; default the embedded demo pair")
    parser.add_argument("--assistant", help="draft: a path or Hub id")
    parser.add_argument("--prompts", type=Path, help="JSON lines (needed with --model)")
    parser.add_argument("--chat", action="store_true", help="put prompts through the chat template")
    parser.add_argument("--problems", type=int, default=32, help="how many prompts (default %(default)s)")
    parser.add_argument(
        "--width", type=int, help="pad the demo target's MLPs with zeros: the same text, a larger cost"
    )
    parser.add_argument("--noise", type=float, help="spoil the demo's draft, in units of its matrices' deviation")
    parser.add_argument("--seed", type=int, default=7, help="of the demo problems")
    parser.add_argument("--repeats", type=int, default=5, help="the figure is the median of these (default 5)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.set_defaults(**defaults)
    return parser


def opened(args: argparse.Namespace) -> tuple[Any, Any, Any, list[str], set[int]]:
    """Return the result of `load` with the target enabled, and the target's end tokens."""
    target, draft, tokenizer, prompts = load(args)
    hla.enable(target)
    ends = target.generation_config.eos_token_id
    return target, draft, tokenizer, prompts, set(ends if isinstance(ends, list) else [ends])


def load(args: argparse.Namespace) -> tuple[Any, Any, Any, list[str]]:
    dtype = getattr(torch, args.dtype)
    if args.model is None:
        models = hla.demo.load(dtype, args.device)
        if args.width:
            widen(models.target, args.width)
        if args.noise:
            add_noise(models.draft, args.noise)
        return (
            models.target,
            models.draft,
            models.tokenizer,
            [p.prompt for p in hla.demo.problems(args.problems, args.seed)],
        )
    target, draft = (
        AutoModelForCausalLM.from_pretrained(m, dtype=dtype).to(args.device).eval()
        for m in (args.model, args.assistant)
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if args.prompts is None:
        raise SystemExit("--model needs --prompts FILE.jsonl")
    prompts = read_prompts(args.prompts, args.problems)
    if args.chat:
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
            for p in prompts
        ]
    return target, draft, tokenizer, prompts


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def machine(device: str) -> str:
    """Return a description of this machine."""
    return (
        torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )


def record(args: argparse.Namespace, where: str, **found: Any) -> None:
    """Write the figures, settings and versions to `args.json`, if it is set."""
    if args.json is None:
        return
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_lossy_assist": hla.__version__,
    }
    known = {"where": where, "settings": settings, "versions": versions}
    args.json.write_text(json.dumps(known | found, indent=1, ensure_ascii=False) + "\n")
