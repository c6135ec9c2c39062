"""Run a script or a module with the float32 linear layers of every loaded model packed for oneDNN, on a CPU.

    python benchmarks/packed.py benchmarks/autojudge_speed.py --model M --assistant D …
    python benchmarks/packed.py hf_lossy_assist.cli mine --model M --assistant D …
    python benchmarks/packed.py --free 1 hf_lossy_assist.cli profile --model M --assistant D --companion int8 …

PyTorch hands a float32 product to MKL, which copies the whole weight into its own order at every call; with few rows that copy is
most of the time. oneDNN's order is made once: the same float32 sums in another order, so what differs is rounding. Both copies are kept, so
memory doubles; `--free N` gives up the first copy in the N models loaded first, which nothing else may then use (an int8 companion is
made of the draft's). `--time ROWS` alone prints what it gains here for one layer of 1536 × 8960.
"""

import itertools
import runpy
import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def pack(model: Any, free: bool = False) -> Any:
    """The same model; its linear layers multiply by packed copies of their weights. `free`: instead of them, but for tied ones."""
    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if (
            type(module) is torch.nn.Linear
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.float32
        ):
            module.forward = packed_product(module)  # type: ignore[method-assign]
            if free and module.weight is not embedding:
                module.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)  # whose use would fail
    return model


def packed_product(linear: torch.nn.Linear) -> Any:
    weight, bias = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach()), linear.bias
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def compare(rows: int) -> None:
    """Medians of 9, in turns."""
    linear = torch.nn.Linear(1536, 8960)
    arms, x = {"MKL": linear, "packed for oneDNN": packed_product(linear)}, torch.randn(rows, 1536)
    spent: dict[str, list[float]] = {name: [] for name in arms}
    with torch.inference_mode():
        for _ in range(10):
            for name, run in arms.items():
                began = time.perf_counter()
                run(x)
                spent[name].append(time.perf_counter() - began)
    for name, seconds in spent.items():
        print(f"{rows} rows, {name}: {statistics.median(seconds[1:]) * 1e3:.1f} ms")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(__doc__)
    if sys.argv[1] == "--time":
        for rows in sys.argv[2:]:
            compare(int(rows))
        return
    usual, loaded = AutoModelForCausalLM.from_pretrained, itertools.count()
    sys.argv = sys.argv[1:]
    freed = 0
    if sys.argv[0] == "--free":
        freed, sys.argv = int(sys.argv[1]), sys.argv[2:]
    AutoModelForCausalLM.from_pretrained = lambda *args, **kwargs: pack(
        usual(*args, **kwargs), free=next(loaded) < freed
    )
    if sys.argv[0].endswith(".py"):
        sys.path.insert(0, sys.argv[0].rpartition("/")[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
