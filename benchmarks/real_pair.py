"""Compare a real pair on a CPU, eager and compiled, with its target alone. Arms take turns at each prompt, and each prompt is a repeat.

    python benchmarks/real_pair.py --model M --assistant D --prompts gsm8k/dev.jsonl --weights int8 --json int8.json
    python benchmarks/real_pair.py … --weights float32 --arms target "target compiled" "assisted" "strict 3 compiled"
    python benchmarks/real_pair.py … --weights bfloat16 --draft-weights int8 --arms "plain target" target "strict 3" svip
    python benchmarks/real_pair.py … --weights int8 --batch-size 8 --limit 48 --arms "plain target" "plain strict 3" "plain strict 3 fallback"

The target is loaded twice: with PyTorch's layers (`plain`) and packed by `hf_lossy_assist.prepack`;
the target alone is measured in both forms. `--draft-weights int8`: the draft in int8 with a target in float.
`compiled` is one compiled function per token for the target (benchmarks/compiled.py) and
compiled rounds for the rest. A call that compiled something is repeated, and only the repetition counts. Greedy, as chats.
`--json FILE` is written after every call, and its results are not measured again.
"""

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from compiled import TargetLoop
from pairs import load, machine, options, record
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig

import hf_lossy_assist as hla
from hf_lossy_assist.models.packed_linears import quantised


Generate = Callable[..., Any]
PLAIN = "plain "
# A policy and what else `generate` is given.
OURS: dict[str, tuple[Any, dict[str, Any]]] = {
    "strict 2": ("strict", {"num_assistant_tokens": 2}),
    "strict 3": ("strict", {"num_assistant_tokens": 3}),
    "strict 4": ("strict", {"num_assistant_tokens": 4}),
    "strict 5": ("strict", {"num_assistant_tokens": 5}),
    "svip": ("svip", {}),
    "suffix": ("strict", {"drafter": "suffix", "num_assistant_tokens": 5}),
    "svip composite": ("svip", {"drafter": "composite"}),
    "auto": ("svip", {"drafter": "auto"}),
    "composite 3": ("strict", {"drafter": "composite", "num_assistant_tokens": 3}),
    "strict 3 fallback": (hla.LossyPolicy(stop=hla.Constant(3)).with_fallback(), {}),
    "svip fallback": (hla.as_policy("svip").with_fallback(), {}),
}
TARGETS = ["target", "target compiled", PLAIN + "target", PLAIN + "target compiled"]
FIRST = [PLAIN + name for name in ("target", "assisted", "strict 3", "strict 5", "svip", "suffix", "composite 3")]
WITHOUT_DRAFT = ("suffix",)


def pair(args: argparse.Namespace, packed: bool) -> tuple[Any, Any, Any, list[str]]:
    """Return target, draft, tokenizer and prompts, the models with the weights that `args` names."""
    target, draft, tokenizer, prompts = load(args)
    for model, weights in ((draft, args.draft_weights or args.weights), (target, args.weights)):
        if weights == "int8":
            quantised(model)
        elif packed:
            hla.prepack(model)
        gc.collect()
    return hla.enable(target), draft, tokenizer, prompts


def assisted(target: Any, draft: Any, gamma: int = 5) -> Generate:
    """Run Transformers' assisted generation with a constant number of tokens."""
    plain, given = type(target).generate, draft.generation_config
    settings = {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }

    def generate(**kwargs: Any) -> Any:
        draft.generation_config = GenerationConfig(**(given.to_diff_dict() | settings))  # it writes back into it
        try:
            return plain(target, assistant_model=draft, **kwargs)
        finally:
            draft.generation_config = given

    return generate


def make_arm(name: str, target: Any, draft: Any, loop: TargetLoop) -> Generate:
    """Return the function of the arm `name`, without `PLAIN`."""
    if name == "target":
        return lambda **kwargs: type(target).generate(target, **kwargs)
    if name == "target compiled":
        return lambda **kwargs: loop(**kwargs)
    if name == "assisted":
        return assisted(target, draft)
    known = name.removesuffix(" compiled")
    policy, settings = OURS[known]
    how = {"compile_config": CompileConfig()} if name != known else {"disable_compile": True}
    draft = None if known in WITHOUT_DRAFT else draft
    return lambda **kwargs: target.generate(assistant_model=draft, lossy_policy=policy, **settings, **how, **kwargs)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def timed(generate: Generate, inputs: Any, args: argparse.Namespace, ends: set[int]) -> dict[str, Any]:
    """Time one call: tokens per second and the outputs, each up to and including its end token."""
    clock = getattr(time, args.clock)
    for _ in range(4):  # a longer text is another graph, a batch that shrinks one more
        before, began = graphs(), clock()
        out = generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, return_dict_in_generate=True)
        seconds = clock() - began
        if graphs() == before:
            break
    texts = []
    for row in out.sequences[:, inputs["input_ids"].shape[1] :].tolist():
        texts.append(row[: next((j + 1 for j, token in enumerate(row) if token in ends), len(row))])
    stats = getattr(out, "speculation", None)
    call = {"speed": sum(map(len, texts)) / seconds, "texts": texts}
    if stats is None:
        return call | {"accepted": None, "eager_because": None}
    report = stats.to_dict()
    steps = {part: report[part] for part in ("num_spec_steps", "num_plain_steps", "forwards", "seconds")}
    return call | {
        "accepted": round(report["draft_acceptance_rate"], 3),
        "eager_because": report["eager_because"],
        **steps,
    }


def summarize(name: str, done: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of an arm over the prompts that all arms have run."""
    count = min(map(len, done.values()))
    speeds = {arm: [call["speed"] for call in calls[:count]] for arm, calls in done.items()}
    alone = [arm for arm in TARGETS if arm in done] or [name]
    best = max(alone, key=lambda arm: statistics.median(speeds[arm]))
    ratios = [a / b for a, b in zip(speeds[name], speeds[best], strict=True)]
    baseline = PLAIN + "target" if name.startswith(PLAIN) else "target"
    texts = [[text for call in done.get(arm, [])[:count] for text in call["texts"]] for arm in (name, baseline)]
    return {
        "arm": name,
        "tokens_per_second": round(statistics.median(speeds[name]), 2),
        "over_best_target": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "best_target": best,
        "equal": sum(a == b for a, b in zip(*texts, strict=False)),
        "texts": len(texts[0]),
        "accepted": statistics.fmean(call["accepted"] or 0 for call in done[name][:count]),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--weights", choices=["float32", "bfloat16", "int8"], default="int8")
    parser.add_argument("--draft-weights", choices=["int8"], help="default: as --weights")
    parser.add_argument("--limit", type=int, default=6, help="prompts (default 6)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    parser.add_argument(
        "--clock",
        choices=["perf_counter", "process_time"],
        default="perf_counter",
        help="process_time with --threads 1 gives ratios on a machine that others use",
    )
    parser.add_argument("--arms", nargs="+", default=FIRST, help=f"of {', '.join(dict.fromkeys([*FIRST, *OURS]))}")
    args = parser.parse_args()
    args.problems, args.chat = args.limit, True
    args.dtype = "float32" if args.weights == "int8" else args.weights
    known = {*TARGETS, "assisted", *OURS, *(f"{name} compiled" for name in OURS)}
    for name in args.arms:
        if name.removeprefix(PLAIN) not in known:
            parser.error(f"--arms: no arm {name!r}; there are {', '.join(sorted(known))}, each also behind {PLAIN!r}")
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # quantize_dynamic's own

    run: dict[str, Generate] = {}
    tokenizer, prompts, ends = None, list[str](), set[int]()
    for packed in (True, False):
        names = [name for name in args.arms if name.startswith(PLAIN) is not packed]
        if packed and names and args.weights == "int8":
            parser.error(f"--arms: int8 is not packed: {', '.join(PLAIN + name for name in names)} instead")
        if not names:
            continue
        target, draft, tokenizer, prompts = pair(args, packed)
        ends = {*torch.tensor([target.generation_config.eos_token_id]).flatten().tolist()}
        longest = max(map(len, tokenizer(prompts).input_ids)) + args.max_new_tokens
        loop = TargetLoop(target, 64 * -(-longest // 64), ends, None)
        run |= {name: make_arm(name.removeprefix(PLAIN), target, draft, loop) for name in names}
    assert tokenizer is not None

    held = json.loads(args.json.read_text())["calls"] if args.json and args.json.exists() else {}
    done: dict[str, list[dict[str, Any]]] = {name: held.get(name, []) for name in args.arms}
    warm = tokenizer(prompts[: args.batch_size], return_tensors="pt", padding=True)
    for name in args.arms:
        began = time.perf_counter()
        with torch.no_grad():
            timed(run[name], warm, argparse.Namespace(max_new_tokens=8, clock=args.clock), ends)
        print(f"{name}: warm in {time.perf_counter() - began:.1f} s", flush=True)
    for turn, start in enumerate(range(0, len(prompts), args.batch_size)):
        inputs = tokenizer(prompts[start : start + args.batch_size], return_tensors="pt", padding=True)
        shift = turn % len(args.arms)
        for name in args.arms[shift:] + args.arms[:shift]:
            if len(done[name]) > turn:
                continue
            done[name].append(timed(run[name], inputs, args, ends))
            print(f"{turn}: {name}: {done[name][-1]['speed']:.2f} tokens/s", flush=True)
            record(args, machine("cpu"), calls={**held, **done})
    show(done, args)


def show(done: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> None:
    rows = [summarize(name, done) for name in args.arms]
    title = f"{args.weights}, batch {args.batch_size}, {machine('cpu')}; best target alone: {rows[0]['best_target']}"
    table = Table("arm", "tokens/s", "× best target", "lowest–highest", "equal texts", "accepted", title=title)
    for r in rows:
        table.add_row(
            r["arm"], f"{r['tokens_per_second']:.1f}", f"{r['over_best_target']:.2f}", f"{r['lowest']:.2f}–{r['highest']:.2f}",
            f"{r['equal']} of {r['texts']}", f"{r['accepted']:.0%}" if r["accepted"] else "",
        )  # fmt: skip
    Console(width=120).print(table)
    record(args, machine("cpu"), calls=done, arms=rows)


if __name__ == "__main__":
    main()
