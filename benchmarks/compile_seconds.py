"""Measure how long a policy's compiled rounds take to build, with an empty compile cache and with one from an earlier process.

    OMP_NUM_THREADS=1 python benchmarks/compile_seconds.py --policies strict svip
    OMP_NUM_THREADS=1 python benchmarks/compile_seconds.py --policies svip --repeats 3

Each measurement is a separate process that runs `hf_lossy_assist.warmup` on the demo pair, batch 1, sequences of up to 256 tokens.
Loading the models is not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pairs import machine


LENGTH = 256


def once(policy: str) -> None:
    """Print the seconds of one warm-up and the graphs that it made, as JSON."""
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    import hf_lossy_assist as hla

    pair = hla.demo.load()
    began = time.perf_counter()
    hla.warmup(pair.target, pair.draft, policy, [1], [LENGTH], compile_config=CompileConfig())
    print(json.dumps({"seconds": time.perf_counter() - began, "graphs": counters["stats"]["unique_graphs"]}))


def in_a_process(policy: str, cache: str) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--once", policy]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["strict", "svip"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--once", metavar="POLICY", help="one warm-up, in this process")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.once:
        return once(args.once)
    found = []
    for policy in args.policies:
        for _ in range(args.repeats):
            with tempfile.TemporaryDirectory() as cache:
                cold, warm = in_a_process(policy, cache), in_a_process(policy, cache)
            found.append(
                {"policy": policy, "graphs": cold["graphs"], "cold": cold["seconds"], "warm": warm["seconds"]}
            )
            print(
                f"{policy}: {cold['graphs']} graphs, cold {cold['seconds']:.1f} s, warm {warm['seconds']:.1f} s",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"machine": machine("cpu"), "found": found}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
