"""Run everything that a GPU can measure: its environment, the tests marked `gpu`, and every arm of the demo pair and of synthetic pairs.

    python benchmarks/gpu.py              # on CUDA all of it; on a CPU a small form that only shows that it runs
    python benchmarks/gpu.py --no-all     # without compiled SVIP, which compiles five functions per pair, and without `target loop`

Writes docs/gpu/<device>.md. Arms as in benchmarks/compiled.py; they take turns, and the figures
are medians. The synthetic pairs (benchmarks/synthetic.py) need no download: real sizes, random weights, and
a draft that agrees with the target at a share of the tokens that `--agreement` sets. An arm's limit is the time to read
the weights and the sequence's keys and values for each forward, at the bandwidth of a copy on this device.
"""

import argparse
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import device
import synthetic
import torch
from compiled import compiled_arms, summarize, warm_up
from engine import Arm, one_repeat
from torch._dynamo.utils import counters

import hf_lossy_assist as hla
from hf_lossy_assist.stats.speculation import SpeculationStats
from hf_lossy_assist.validation import one_line, shown


ROOT = Path(__file__).parent.parent
DEMO = "demo"
LONGEST = ("target loop", "svip compiled")  # arms, to compile
SPARE = 1.3  # bytes of a pair relative to its weights: caches, graphs, a second set of buffers


class Pair(NamedTuple):
    """A pair to measure; `prompts` are inputs of `tokenizer`."""

    title: str
    target: Any
    draft: Any
    tokenizer: Any
    prompts: list[Any]
    ends: set[int]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, help="default: on a CPU")
    parser.add_argument("--problems", type=int, help="prompts of each pair (default 8, small 3)")
    parser.add_argument("--max-new-tokens", type=int, help="of each prompt (default 128, small 32)")
    parser.add_argument("--repeats", type=int, default=5, help="the figure is the median of these")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--agreement", type=float, default=0.8, help="of the synthetic pairs")
    names = [DEMO, *(sizes.name for sizes in (synthetic.SMALL, *synthetic.LARGE))]
    parser.add_argument(
        "--pairs", nargs="+", choices=names, help="default: all; in small form the demo and the smallest"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1])
    parser.add_argument(
        "--all",
        action=argparse.BooleanOptionalAction,
        help="the arms that compile longest as well (default: not in small form)",
    )
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="leave the tests out")
    parser.add_argument("--mode", help='of torch.compile (default "reduce-overhead" on CUDA: CUDA graphs)')
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu", help="the folder of the report")
    args = parser.parse_args()
    if 1 not in args.batch_sizes:
        parser.error("--batch-sizes: 1 is needed: Transformers' assisted generation does one row at a time")
    cuda = args.device.startswith("cuda")
    args.small = not cuda if args.small is None else args.small
    args.problems = args.problems or (3 if args.small else 8)
    args.max_new_tokens = args.max_new_tokens or (32 if args.small else 128)
    args.mode = args.mode or ("reduce-overhead" if cuda else None)
    args.pairs = args.pairs or (names[:2] if args.small else [DEMO, *names[2:]])
    args.all = not args.small if args.all is None else args.all
    args.policies, args.lengths = ["svip"], None
    args.capacity = 256  # slots of the target's own static cache, as many as this package's have
    return args


def tests(where: str) -> str:
    """Return the result of the tests marked `gpu`, in one line."""
    if not where.startswith("cuda"):
        return "not run: they need CUDA"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "; ".join([lines[-1] if lines else done.stderr.strip()[-300:], *failed])


def pairs(args: argparse.Namespace, left_out: list[str]) -> Iterator[Pair]:
    """Yield the pairs one after the other, so that the last one's memory is free. Those that do not fit are named in `left_out`."""
    if DEMO in args.pairs:
        yield demo(args)
    dtype = torch.float32 if args.small else torch.bfloat16
    for sizes in (synthetic.SMALL, *synthetic.LARGE):
        if sizes.name not in args.pairs:
            continue
        needed = SPARE * synthetic.bytes_needed(sizes, dtype)
        if args.device.startswith("cuda") and needed > torch.cuda.mem_get_info()[0]:
            left_out.append(f"synthetic {sizes.name}: needs about {needed / device.GIB:.0f} GiB")
            continue
        yield made(sizes, dtype, args)


def made(sizes: synthetic.Synthetic, dtype: torch.dtype, args: argparse.Namespace) -> Pair:
    """Build a synthetic pair."""
    target, draft = synthetic.models(sizes, args.agreement, dtype, args.device)
    title = f"synthetic {sizes.name}, {str(dtype).removeprefix('torch.')}, agreement {args.agreement:.0%}"
    texts = synthetic.prompts(sizes, args.problems, length=64)
    return Pair(title, hla.enable(target), draft, synthetic.tokenizer, texts, set())


def demo(args: argparse.Namespace) -> Pair:
    """Load the embedded models."""
    models = hla.demo.load(torch.float32, args.device)
    prompts = [problem.prompt for problem in hla.demo.problems(args.problems, 777)]
    ends = models.target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    return Pair("demo pair, float32", hla.enable(models.target), models.draft, models.tokenizer, prompts, ends)


def measure(pair: Pair, args: argparse.Namespace, speed: float) -> dict[str, Any]:
    """Measure all arms in turns; `speed`: bytes per second."""
    target, draft = pair.target, pair.draft
    arms = [arm for arm in compiled_arms(target, draft, args, pair.ends) if not arm.name.endswith(" auto")]
    arms = [arm for arm in arms if args.all or arm.name not in LONGEST]
    took, running, failed = [], [], []
    for arm in arms:
        try:
            took.append(warm_up([arm], pair.tokenizer, pair.prompts, args, pair.ends)[0])
        except (
            Exception
        ) as error:  # of one arm, on a device that nobody has tried: the others' figures are worth having
            if arm.name in ("target", f"assisted γ={args.gamma}"):  # which all others are compared with
                raise
            failed.append(f"{arm.name}, batch {arm.batch_size}: {type(error).__name__}: {one_line(str(error), 300)}")
            print(f"{pair.title}: {failed[-1]}", file=sys.stderr)
            continue
        running.append(arm)
        print(f"{pair.title}: {arm.name}, batch {arm.batch_size}: {took[-1]:.1f} s of warm-up", file=sys.stderr)
    arms = running
    known = counters["stats"]["unique_graphs"]
    for _ in range(args.repeats):
        one_repeat(arms, pair.tokenizer, pair.prompts, args, pair.ends)
    again = counters["stats"]["unique_graphs"] - known
    width = sum(pair.tokenizer([p], return_tensors="pt")["input_ids"].shape[1] for p in pair.prompts)
    length = width / len(pair.prompts) + args.max_new_tokens / 2
    rows = []
    for k, arm in enumerate(arms):
        row = summarize(arm, arms, took[k])
        needed = count_bytes(arm, pair, length)
        row["limit"] = None if needed is None else arm.tokens / needed * speed
        row["share"] = None if row["limit"] is None else row["tokens_per_second"] / row["limit"]
        stats = SpeculationStats.merge(arm.calls) if arm.calls else None
        row["accepted"] = None if stats is None else stats.draft_acceptance_rate
        rows.append(row)
    read = {"target": device.count_weight_bytes(target), "draft": device.count_weight_bytes(draft)}
    cache = {"target": device.count_cache_bytes(target, length), "draft": device.count_cache_bytes(draft, length)}
    found = {"title": pair.title, "rows": rows, "again": again, "failed": failed}
    return found | {"read": read, "cache": cache, "length": length}


def count_bytes(arm: Arm, pair: Pair, length: float) -> float | None:
    """Return the bytes that the forwards of an arm's last repeat read, or None if it does not report their number."""
    if arm.calls:
        forwards = SpeculationStats.merge(arm.calls).forwards
        prompts = forwards.get("prefill", 0) / 2  # half of them per model, if prompts are prefilled
        target, draft = forwards["target"] + prompts, forwards["draft"] + prompts
    elif arm.name.startswith("target"):
        target, draft = arm.tokens / arm.batch_size, 0  # rows end together, or this is less than was read
    else:
        return None
    of = {
        m: device.count_weight_bytes(m) + arm.batch_size * device.count_cache_bytes(m, length)
        for m in (pair.target, pair.draft)
    }
    return target * of[pair.target] + draft * of[pair.draft]


def format_lines(found: dict[str, Any], args: argparse.Namespace) -> Iterator[str]:
    """Return one pair's figures as Markdown."""
    mib = {name: f"{found['read'][name] / 2**20:.1f} + {found['cache'][name] / 2**20:.2f}" for name in found["read"]}
    yield f"## {found['title']}\n"
    yield f"A forward reads, weights and keys and values, MiB: target {mib['target']}, draft {mib['draft']}, behind {found['length']:.0f} tokens."
    yield f"{args.problems} prompts × {args.max_new_tokens} tokens, greedy. Compiled again after the warm-up: {found['again']}.\n"
    yield "| arm | batch | tokens/s | range | × best target | × assisted | accepted | text as the target's | limit, tokens/s | share of it | warm-up, s |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for r in found["rows"]:
        limit, share = ("–", "–") if r["limit"] is None else (f"{r['limit']:.0f}", f"{r['share']:.0%}")
        accepted = "–" if r["accepted"] is None else f"{r['accepted']:.0%}"
        yield (
            f"| {r['arm']} | {r['batch_size']} | {r['tokens_per_second']} | {r['lowest']}–{r['highest']} | {r['over_best_target']} | "
            f"{r['over_assisted']} | {accepted} | {r['texts_equal_to_target']:.0%} | {limit} | {share} | {r['warm_up_seconds']} |"
        )
    yield ""
    yield from (f"Failed: {line}.\n" for line in found["failed"])


def main() -> None:
    args, left_out = options(), list[str]()
    speed = device.measured(args.device)
    facts = device.environment(args.device) | {
        "bandwidth of a copy": f"{speed / 1e9:.0f} GB/s",
        "mode": args.mode or "default",
    }
    name = device.find_name(args.device)
    result = tests(args.device) if args.tests else "left out"
    given = {key: value for key, value in vars(args).items() if key not in ("out", "svip", "capacity")}
    settings = ", ".join(f"{key} {shown(value)}" for key, value in given.items())
    lines = [f"# {name}\n", f"Made by `python benchmarks/gpu.py` with {settings}.\n"]
    lines += ["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in facts.items()), ""]
    lines.append(f"Tests marked `gpu`: {result}.\n")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.md"
    for pair in pairs(args, left_out):  # keeps no reference to a pair
        lines += format_lines(measure(pair, args, speed), args)
        path.write_text("\n".join(lines), encoding="utf-8")  # partial results, in case a later pair fails
        del pair
        gc.collect()
        torch.compiler.reset()
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
    lines += [f"Left out: {reason}.\n" for reason in left_out]
    path.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
