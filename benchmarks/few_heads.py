"""A block of a few tokens on a cache of rows, of a model with fewer heads of keys and values than of queries, on a CPU: with the copies of what is
cached that Transformers makes, and without.

    python benchmarks/few_heads.py                                   # random, of the sizes of Qwen2.5 1.5B, 4 of its 28 blocks, in int8
    python benchmarks/few_heads.py --weights float32 --rows 1 8 --texts 300 3000

Arms take turns; medians of `--repeats` blocks, lowest and highest. Embeddings and output layer are tiny: they cost the same in both.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from pairs import machine, record
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from hf_lossy_assist.models import few_heads
from hf_lossy_assist.models.int8 import quantised
from hf_lossy_assist.models.row_model import RowModel


ARMS = {"copies": few_heads._theirs, "none": few_heads._chosen}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=1536)
    parser.add_argument("--intermediate-size", type=int, default=8960)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--key-value-heads", type=int, default=2)
    parser.add_argument("--weights", choices=("int8", "float32"), default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--texts", type=int, nargs="+", default=[300, 1000, 3000], help="tokens that each row holds")
    parser.add_argument("--block", type=int, default=6, help="tokens of a block (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


def model_of(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256, hidden_size=args.hidden_size, intermediate_size=args.intermediate_size, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.key_value_heads, max_position_embeddings=8192,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    return quantised(model) if args.weights == "int8" else model


@torch.inference_mode()
def timed(model: Any, rows: int, text: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each arm's blocks."""
    its = RowModel(model, rows, text + args.block)
    its.feed(torch.randint(256, (rows, text)), [text - row for row in range(rows)], keep=0)
    block, held = torch.randint(256, (rows, args.block)), list(its.lengths)
    spent: dict[str, list[float]] = {name: [] for name in ARMS}
    for repeat in range(args.repeats + 1):
        for name in ARMS if repeat % 2 else reversed(ARMS):
            few_heads._chosen = ARMS[name]
            began = time.perf_counter()
            its.feed(block, [args.block] * rows, keep=args.block)
            spent[name].append(time.perf_counter() - began)
            its.rollback(held)
    few_heads._chosen = ARMS["none"]
    return {name: seconds[1:] for name, seconds in spent.items()}


def main() -> None:
    args = options()
    if few_heads._theirs is None or not few_heads._reads_few_heads(torch.float32):
        raise SystemExit("this PyTorch or Transformers copies in any case: nothing to compare")
    model, results = model_of(args), []
    table = Table("rows", "tokens", "copies, ms", "none, ms", "times as fast", title=machine("cpu"))
    for rows in args.rows:
        for text in args.texts:
            seconds = timed(model, rows, text, args)
            ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
            row = {
                "rows": rows,
                "tokens": text,
                "ratio": statistics.median(ratios),
                "range": [min(ratios), max(ratios)],
            }
            results.append(row | {name: 1e3 * statistics.median(its) for name, its in seconds.items()})
            table.add_row(
                str(rows), str(text), *(f"{results[-1][name]:.1f}" for name in ARMS),
                f"{row['ratio']:.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
            )  # fmt: skip
    Console(width=120).print(table)
    record(args, machine("cpu"), results=results)


if __name__ == "__main__":
    main()
