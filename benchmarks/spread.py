"""Rounds as `hf-lossy plan --tp` works them out, beside the rounds that one and two processes take, by tensor parallelism over gloo.

    python benchmarks/spread.py                              # a random Llama of 59 million weights, its draft, γ = 5
    python benchmarks/spread.py --hidden 1024 --layers 12 --rows 4

A process has one thread. The plan is made in the same processes from what a rank computes by itself (a model of the sizes of its part, all ranks
at once, as they share the memory), from what a narrow model with as many layers takes longer spread than whole, and from the seconds of a large
all-reduce; no round is run for it. Rounds, and steps of the target alone, are timed in calls whose text has the length that was planned for.
Plans and measurements take turns, for what two processes get of a shared machine changes from minute to minute; figures are medians over the
repeats, and the ratio that of the ratios within a repeat, with the lowest and highest.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pairs import machine, record
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist.evaluation.spread_costs import Link, Load, Shape, tensor_parallel
from hf_lossy_assist.evaluation.spread_times import forward_seconds, part_seconds, timed_link


NEW = 40
INNER = 3  # repeats within a plan


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def config(hidden: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=8 * hidden // 3 // 64 * 64, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def work(args: argparse.Namespace) -> None:
    """One process of the run: plans first, then measures."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    given = {"tp_plan": "auto"} if ranks > 1 else {}
    target = AutoModelForCausalLM.from_pretrained(args.worker / "target", dtype=torch.float32, **given).eval()
    draft = AutoModelForCausalLM.from_pretrained(args.worker / "draft", dtype=torch.float32).eval()
    hla.enable(target)
    narrow = []
    if ranks > 1:
        paths, whole = args.worker / "narrow", dict[str, Any]()
        narrow = [
            AutoModelForCausalLM.from_pretrained(paths, dtype=torch.float32, **how).eval() for how in (given, whole)
        ]
    found = []
    for turn in range(args.repeats + 1):
        planned, measured = plan(target, draft, narrow, ranks, args), measure(target, draft, args)
        if turn:  # the first is a warm-up
            found.append({"planned": planned, "measured": measured})
    if int(os.environ.get("RANK", "0")) == 0:
        (args.worker / f"{ranks}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def plan(target: Any, draft: Any, narrow: list[Any], ranks: int, args: argparse.Namespace) -> dict[str, float]:
    """Seconds as they are worked out. `narrow`: a narrow model, spread and whole."""
    load = Load(args.rows, args.context + NEW // 2, width=4)
    link = Link(0.0, 1e30)
    if ranks > 1:
        numbers = 1, 1 << 18
        few, many = timed_link(dist.all_reduce, numbers)
        dist.barrier()
        # What a collective costs with all that the framework does around it: of a narrow model with as many layers, spread and whole.
        together, alone = (forward_seconds(its, load, (1, args.gamma + 1), INNER)(1) for its in narrow)
        hop = (together - alone) / (2 * args.layers + 3)
        link = Link(hop, 2 * (ranks - 1) / ranks * 4 * (numbers[1] - numbers[0]) / (many - few))
        dist.barrier()
    part = part_seconds(target.config, ranks, load, "cpu", torch.float32, INNER)
    seconds, over_link = tensor_parallel(part, Shape.of(target.config), load, ranks, link)
    step = forward_seconds(draft, load, widths=(1, 2), repeats=INNER)(1)
    block = args.gamma + 1
    return {
        "target step": seconds(1),
        "round": args.gamma * step + seconds(block),
        "of the round, link": over_link(block),
    }


def measure(target: Any, draft: Any, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step of the target alone, and of a round."""
    torch.manual_seed(0)
    ids = torch.randint(1, 8192, (args.rows, args.context))
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    policy = hla.LossyPolicy(stop=hla.Constant(args.gamma))
    found: dict[str, float] = {}
    for name in ("target step", "round"):
        given = {} if name == "target step" else {"assistant_model": draft, "lossy_policy": policy}
        took, steps = [], []
        # Their difference has no prompt in it, neither the target's nor the draft's.
        for new in (1 if name == "target step" else args.gamma + 2, NEW):
            began = time.perf_counter()
            out = target.generate(**call, **given, max_new_tokens=new)
            took.append(time.perf_counter() - began)
            steps.append(out.speculation.forwards["target"] if given else new)
        found[name] = (took[1] - took[0]) / (steps[1] - steps[0])
    return found


def shown_times(planned: list[float], measured: list[float | None]) -> list[str]:
    """A row of the table: medians, in ms, and the median of their ratios, from the lowest to the highest."""
    times = [p * 1e3 for p in planned], [m * 1e3 for m in measured if m is not None]
    medians = [f"{statistics.median(its):.1f}" if its else "" for its in times]
    ratios = [p / m for p, m in zip(*times, strict=False)]
    between = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""
    return [*medians, between]


def main() -> None:
    args = options()
    if args.worker is not None:
        return work(args)
    table = Table("processes", "", "planned, ms", "measured, ms", "planned ÷ measured")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        for name, sizes in {
            "target": (args.hidden, args.layers),
            "narrow": (256, args.layers),
            "draft": (256, 2),
        }.items():
            LlamaForCausalLM(config(*sizes)).save_pretrained(Path(folder, name))
        words = [
            word
            for name in ("rows", "context", "gamma", "repeats")
            for word in (f"--{name}", str(getattr(args, name)))
        ]
        for ranks in (1, 2):
            launch = (
                ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
            )
            command = [sys.executable, *launch, __file__, "--worker", folder, *words]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            found = json.loads(Path(folder, f"{ranks}.json").read_text())
            for name in found[0]["planned"]:
                planned, measured = ([its[kind].get(name) for its in found] for kind in ("planned", "measured"))
                table.add_row(str(ranks), name, *shown_times(planned, measured))
                rows.append({"processes": ranks, "what": name, "planned": planned, "measured": measured})
    where = f"{machine('cpu')}; each process with one"
    Console(width=120).print(where, table)
    record(args, where, rows=rows)


if __name__ == "__main__":
    main()
