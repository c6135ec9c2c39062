"""Measure the demo models: answers, kinds of mismatch, step times.

    python benchmarks/demo_models.py [--problems 500] [--seed 12345] [--models DIR] [--json]

`--models` is a folder with `target`, `draft` and `companion`; default the shipped ones.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_lossy_assist import demo
from hf_lossy_assist.models.cache_name import CACHE, cache_of


def respond(model, tokenizer, problems, batch_size=100):
    """Greedy continuations as text, in batches of Transformers' own `generate`."""
    texts = []
    for i in range(0, len(problems), batch_size):
        batch = tokenizer([p.prompt for p in problems[i : i + batch_size]], return_tensors="pt", padding=True)
        out = model.generate(**batch, max_new_tokens=64, do_sample=False)
        texts += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def mismatches(draft, tokenizer, problems, texts):
    """Positions of the target's texts where the draft's argmax differs: (all tokens, differing, differing on a digit)."""
    tokens = differing = digits = 0
    for problem, text in zip(problems, texts, strict=True):
        prompt = tokenizer(problem.prompt, return_tensors="pt").input_ids
        full = torch.cat([prompt, tokenizer(text + tokenizer.eos_token, return_tensors="pt").input_ids], dim=1)
        said = full[0, prompt.shape[1] :]
        guess = draft(full).logits[0, prompt.shape[1] - 1 : -1].argmax(-1)
        wrong = said[guess != said].tolist()
        tokens += len(said)
        differing += len(wrong)
        digits += sum(tokenizer.decode([t]).strip().isdigit() for t in wrong)
    return tokens, differing, digits


def step_seconds(model, length=90, repeats=60):
    """Median seconds of one cached one-token forward after `length` tokens."""
    ids = torch.randint(2, model.config.vocab_size, (1, length))
    cache = cache_of(model(ids, use_cache=True))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        model(ids[:, :1], **{CACHE: cache}, use_cache=True)
        times.append(time.perf_counter() - began)
        cache.crop(-1)
    return statistics.median(times[10:])


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--models", type=Path, default=demo.FOLDER)
    parser.add_argument("--names", nargs="*", default=["target", "draft", "companion"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    problems = demo.problems(args.problems, seed=args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.models / args.names[0])
    models = {n: AutoModelForCausalLM.from_pretrained(args.models / n, dtype=torch.float32).eval() for n in args.names}
    report, target_texts = {}, None
    for name, model in models.items():
        texts = respond(model, tokenizer, problems)
        if target_texts is None:
            target_texts = texts
        right = sum(demo.answer(t) == p.answer for p, t in zip(problems, texts, strict=True))
        tokens, differing, digits = mismatches(model, tokenizer, problems, target_texts)
        report[name] = {
            "accuracy": right / len(problems),
            "unanswered": sum(demo.answer(t) is None for t in texts) / len(problems),
            "agreement_with_target": 1 - differing / tokens,
            "mismatches": differing,
            "share_of_mismatches_on_digits": digits / differing if differing else None,
            "step_ms": 1000 * step_seconds(model),
            "parameters": sum(p.numel() for p in model.parameters()),
        }
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        for name, row in report.items():
            print(name, {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        if "target" in report and "draft" in report:
            print("target step / draft step:", round(report["target"]["step_ms"] / report["draft"]["step_ms"], 2))


if __name__ == "__main__":
    main()
