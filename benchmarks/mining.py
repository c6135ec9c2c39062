"""How fast AutoJudge's important tokens are mined: many problems in flight against one after the other.

    python benchmarks/mining.py                             # the demo pair

Each batch size mines the same problems in every repeat, in an order that rotates. The ratio is the median over the repeats of how many times
as fast it was as one problem at a time in the same repeat. Labels are compared too: they must not depend on the batch size. Also the
naive variant (each mismatch of the target's response alone), for the share of important tokens it finds.
"""

import argparse
import statistics
import time

import torch
from pairs import machine
from rich.console import Console
from rich.table import Table

import hf_lossy_assist as hla
from hf_lossy_assist.methods.autojudge.in_flight import mine_problems
from hf_lossy_assist.methods.autojudge.mine_settings import MineSettings
from hf_lossy_assist.methods.autojudge.search import Mined
from hf_lossy_assist.tasks.tasks import DemoTask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--seed", type=int, default=5, help="of the demo's calibration problems")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if 1 not in args.batch_sizes:
        parser.error("--batch-sizes needs 1, which the others are compared with")

    models = hla.demo.load(torch.float32, args.device)
    task = DemoTask("calibration", args.seed)
    problems = task.problems(args.problems)

    def run(batch_size: int, count: int, naive: bool = False) -> tuple[list[Mined], float]:
        settings, began = MineSettings(args.max_new_tokens, naive=naive), time.perf_counter()
        found = mine_problems(
            models.target, models.draft, models.tokenizer, task, problems[:count], settings, batch_size=batch_size
        )
        return sorted(found, key=lambda mined: mined.problem), time.perf_counter() - began

    sizes = args.batch_sizes
    for size in sizes:
        run(size, 2)  # warm-up
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    mined: dict[int, list[Mined]] = {}
    for repeat in range(args.repeats):
        shift = repeat % len(sizes)
        for size in sizes[shift:] + sizes[:shift]:
            mined[size], spent = run(size, len(problems))
            seconds[size].append(spent)

    table = Table("problems in flight", "seconds", "problems / s", "target tokens / s", "× one by one", "labels equal")
    for size in sizes:
        spent, tokens = statistics.median(seconds[size]), sum(m.new_tokens for m in mined[size])
        times = statistics.median(a / b for a, b in zip(seconds[1], seconds[size], strict=True))
        equal = [m.mismatches for m in mined[size]] == [m.mismatches for m in mined[1]]
        table.add_row(str(size), f"{spent:.2f}", f"{len(problems) / spent:.2f}", f"{tokens / spent:.0f}", f"{times:.2f}",
                      "yes" if equal else "NO")  # fmt: skip
    console = Console()
    console.print(table)
    for name, found in (("Algorithm 1", mined[max(sizes)]), ("naive", run(max(sizes), len(problems), naive=True)[0])):
        labels = [m.important for one in found for m in one.mismatches]
        console.print(f"{name}: {len(labels)} mismatches, {sum(labels)} important ({sum(labels) / len(labels):.1%})")
    console.print(machine(args.device))


if __name__ == "__main__":
    main()
