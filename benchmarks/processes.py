"""Time jobs of `hf-lossy` in one process and shared by several, each process with one thread; arms take turns within each repeat.

    torchrun --standalone --nproc-per-node 2 benchmarks/processes.py         # mining and comparing the demo pair
    python benchmarks/processes.py --ray                 # `hla.ray.Writer`: generate_many alone, one worker, two workers
    python benchmarks/processes.py --machines            # machines that die and join: rows, texts, the driver's memory

The processes persist: in the arm of one process, the first one works while the others wait. Seconds are of the whole command, loading included, without
the start of Python. "at once": each process does the whole job at the same time, so processes × alone ÷ at once is
the machine's limit for independent processes. Ratios are medians of the ratios within a repeat.

With --ray, speeds are rows a second of the blocks that are written while all workers write, with the gaps between blocks and without the start
of Ray and of actors. With --machines, a node of three is killed (SIGKILL) and one added at `--kills` random moments in a job of
--rows rows, and so in `mine` and `collect`; then the same job runs with ten times the rows, for the driver's peak memory.
"""

import argparse
import contextlib
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from pairs import machine, record
from rich.console import Console
from rich.table import Table

import hf_lossy_assist as hla
from hf_lossy_assist.cli import _runs, app
from hf_lossy_assist.training.processes import ALONE, Processes


JOBS = {
    "mine": ["mine", "--task", "demo", "--limit", "64", "--batch-size", "8"],
    "compare": ["compare", "--limit", "24", "--no-static", "--policies", "svip"],
    "collect": ["collect", "--prompts", "demo", "--limit", "64", "--max-new-tokens", "48"],
}


ARMS = "alone", "together", "at once"


def seconds(words: list[str], together: Processes, arm: str) -> float:
    """Return the seconds of one job, until all processes have finished."""
    folders = together.all(tempfile.mkdtemp())
    original, out = Processes.started, folders[together.rank if arm == "at once" else 0]
    if arm != "together":
        Processes.started = classmethod(lambda cls: ALONE)  # type: ignore[method-assign, assignment]
    together.wait()
    began = time.perf_counter()
    if together.first or arm != "alone":
        sys.argv = ["hf-lossy", *words, "--out", str(Path(out, "found"))]
        with (
            open(os.devnull, "w") as nothing,
            contextlib.redirect_stdout(nothing),
            contextlib.redirect_stderr(nothing),
        ):
            code = _runs.run(app)
        assert not code, f"{' '.join(words)}: exit code {code}"
    together.wait()
    Processes.started = original  # type: ignore[method-assign]
    return time.perf_counter() - began


SETTINGS: dict[str, Any] = {"policy": "svip", "max_rows": 8}
BLOCK = 64  # rows of a block
NODE = {"num_cpus": 1, "object_store_memory": 100_000_000}


class NamedWriter:
    """A `Writer` whose rows tell which process wrote them, and when."""

    def __init__(self, **settings: Any):
        self.writer = hla.ray.Writer(**settings)

    def __call__(self, block: pa.Table) -> pa.Table:
        began = time.perf_counter()  # one clock for all processes of a machine
        table = self.writer(block)
        for name, value in (("worker", os.getpid()), ("began", began), ("ended", time.perf_counter())):
            table = table.append_column(name, [[value] * table.num_rows])
        return table


@contextlib.contextmanager
def cluster_of(nodes: int) -> Iterator[Any]:
    # Read when Ray is imported: a busy machine starts nodes slowly.
    os.environ |= {"RAY_raylet_start_wait_time_s": "600", "RAY_worker_niceness": "0"}
    import ray
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def list_rows(count: int) -> list[dict[str, Any]]:
    few = hla.demo.problems(min(count, 2000), seed=7)
    return [{"id": n, "prompt": few[n % len(few)].prompt} for n in range(count)]


def write(rows: list[dict[str, Any]], workers: int, new_tokens: int, rows_of_block: int = BLOCK) -> Iterator[Any]:
    """Yield the blocks of a job on the cluster as they are finished."""
    import ray

    dataset = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // rows_of_block))
    written = dataset.map_batches(
        NamedWriter,
        fn_constructor_kwargs=SETTINGS | {"max_new_tokens": new_tokens},
        compute=ray.data.ActorPoolStrategy(size=workers),
        batch_size=rows_of_block,
        batch_format="pyarrow",
    )
    yield from written.iter_batches(batch_size=None, batch_format="pyarrow")


def rows_per_second(rows: list[dict[str, Any]], workers: int, new_tokens: int) -> float:
    """Return the rows a second while all workers write."""
    blocks: dict[int, list[tuple[float, float, int]]] = {}
    for table in write(rows, workers, new_tokens):
        for worker, began, ended in {
            tuple(row.values()) for row in table.select(["worker", "began", "ended"]).to_pylist()
        }:
            blocks.setdefault(worker, []).append((began, ended, BLOCK))
    first = max(min(began for began, _, _ in found) for found in blocks.values())
    last = min(max(ended for _, ended, _ in found) for found in blocks.values())
    speed = 0.0
    for found in blocks.values():
        inside = sorted(block for block in found if block[0] >= first and block[1] <= last)
        assert len(blocks) == workers and inside, "each worker wrote several blocks"
        speed += sum(count for _, _, count in inside) / (inside[-1][1] - inside[0][0])
    return speed


def alone_per_second(rows: list[dict[str, Any]], new_tokens: int) -> float:
    models = hla.demo.load()
    many = hla.generate_many(
        models.target, [row["prompt"] for row in rows], assistant_model=models.draft, lossy_policy="svip", max_rows=8,
        tokenizer=models.tokenizer, max_new_tokens=new_tokens,
    )  # fmt: skip
    began = time.perf_counter()
    return sum(1 for _ in many) / (time.perf_counter() - began)


def measure_workers(args: argparse.Namespace) -> None:
    """Compare `generate_many` with one worker and two, in turns."""
    rows, found = list_rows(args.rows or 1024), {"alone": list[float](), "one": list[float](), "two": list[float]()}
    with cluster_of(2):
        arms: dict[str, Callable[[], float]] = {
            "alone": lambda: alone_per_second(rows[: len(rows) // 2], args.max_new_tokens),
            "one": lambda: rows_per_second(rows[: len(rows) // 2], 1, args.max_new_tokens),
            "two": lambda: rows_per_second(rows, 2, args.max_new_tokens),
        }
        for repeat in range(args.repeats):
            for place in range(len(arms)):
                name = list(arms)[(place + repeat) % len(arms)]
                found[name].append(arms[name]())
    table = Table("", "rows/s", "times", "range")
    for name, over in (("alone", "alone"), ("one", "alone"), ("two", "one")):
        ratios = [here / there for here, there in zip(found[name], found[over], strict=True)]
        low, high = min(ratios), max(ratios)
        table.add_row(
            name,
            f"{statistics.median(found[name]):.1f}",
            f"{statistics.median(ratios):.3f} {over}",
            f"{low:.3f}–{high:.3f}",
        )
    Console(width=100).print(table, machine("cpu"))
    record(args, machine("cpu"), results=found)


def replace_node(cluster: Any) -> None:
    """Kill a node that is not the head (SIGKILL), and add one."""
    cluster.remove_node(random.choice(list(cluster.worker_nodes)), allow_graceful=False)
    cluster.add_node(**NODE)


def survive(args: argparse.Namespace) -> None:
    """Check rows, texts and memory while machines die and join."""
    random.seed(args.seed)
    count, peaks, texts = args.rows or 2000, list[float](), dict[int, list[int]]()
    with cluster_of(3) as cluster:
        for rows in (list_rows(count), list_rows(10 * count)):
            moments = sorted(random.sample(range(len(rows) * 9 // 10), args.kills)) if not peaks else []
            ids = list[int]()
            for block in write(rows, 3, args.max_new_tokens, 16):
                ids += block["id"].to_pylist()
                if not peaks:
                    texts.update(zip(block["id"].to_pylist(), block["token_ids"].to_pylist(), strict=True))
                while moments and len(ids) > moments[0]:
                    replace_node(cluster)
                    moments.pop(0)
            assert sorted(ids) == list(range(len(rows))) and not moments, "every row once, and every kill"
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
            print(f"{len(rows)} rows once each, driver's peak {peaks[-1]:.0f} MB", flush=True)
        print(f"driver's memory: {peaks[1] / peaks[0]:.2f} ×", flush=True)
        for name in ("mine", "collect"):
            check_job(cluster, name)
    rows, alone = list_rows(count), hla.ray.Writer(**SETTINGS, max_new_tokens=args.max_new_tokens)
    same = alone(pa.Table.from_pylist(rows))["token_ids"].to_pylist()
    assert [texts[n] for n in range(count)] == same, "texts equal one process's"
    print(f"{count} texts equal one process's")


def check_job(cluster: Any, name: str) -> None:
    """Check that a job on the cluster, while a node dies, gives one process's data."""
    from datasets import load_from_disk

    folder, codes = Path(tempfile.mkdtemp()), list[int]()

    def run(out: str, *more: str) -> None:
        sys.argv = ["hf-lossy", *JOBS[name], *more, "--out", str(folder / out)]
        codes.append(_runs.run(app))

    job = threading.Thread(target=run, args=("cluster", "--ray", cluster.address))
    job.start()
    time.sleep(random.uniform(10, 30))
    assert job.is_alive(), "the node dies before the job ends"
    replace_node(cluster)  # Ray starts nodes in the main thread alone
    job.join()
    run("alone")
    assert codes == [0, 0]
    data = [load_from_disk(str(folder / out)).to_list() for out in ("cluster", "alone")]
    assert data[0] == data[1] and data[0], name
    print(f"{name}: {len(data[0])} rows as one process's", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["mine", "compare"])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--ray", action="store_true", help="time workers of a Ray cluster")
    parser.add_argument("--machines", action="store_true", help="kill machines of a Ray cluster")
    parser.add_argument("--rows", type=int, help="of --ray (default 1024; in 64s) and --machines (2000)")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=32, help="of --ray and --machines")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of --machines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.ray or args.machines:
        (survive if args.machines else measure_workers)(args)
        return
    together = Processes.started()
    found = []
    for name in args.jobs:
        took: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for repeat in range(args.repeats + 1):
            for place in range(len(ARMS)):
                arm = ARMS[(place + repeat) % len(ARMS)]
                spent = seconds(JOBS[name], together, arm)
                if repeat:
                    took[arm].append(spent)
        ratios = [one / several for one, several in zip(took["alone"], took["together"], strict=True)]
        most = [together.count * one / each for one, each in zip(took["alone"], took["at once"], strict=True)]
        found.append({"job": name, **took, "ratio": statistics.median(ratios), "ratios": ratios, "ceilings": most})
    if together.first:
        table = Table(
            "job", "one process, s", f"{together.count} processes, s", "times as fast", "range", "sharing nothing"
        )
        for row in found:
            alone, several, most = (statistics.median(row[kind]) for kind in ("alone", "together", "ceilings"))
            low, high = min(row["ratios"]), max(row["ratios"])
            table.add_row(
                str(row["job"]),
                f"{alone:.1f}",
                f"{several:.1f}",
                f"{row['ratio']:.2f}",
                f"{low:.2f}–{high:.2f}",
                f"{most:.2f}",
            )
        Console(width=100).print(table, machine("cpu"))
        record(args, machine("cpu"), results=found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
