"""Compare compiled rounds with eager ones and with the target alone, which is compiled as well. All arms take turns in one run.

    python benchmarks/compiled.py                                 # the demo pair, CPU, batches of 1, 4, 8, 32
    python benchmarks/compiled.py --batch-sizes 1 --mode max-autotune-no-cudagraphs --json out.json

Arms:
- `target`: Transformers' generate.
- `target static`: the same, compiled, with one StaticCache that all calls share.
- `target loop`: the least overhead of a compiled target: one compiled function per token, with argmax.
- `assisted γ`: Transformers', batch 1, eager and, from Transformers 5.24, compiled on a static cache.
- `strict γ` and the policies of this package: eager and compiled.

Each arm compiles during the warm-up, whose seconds are shown; afterwards nothing may be recompiled. Otherwise as
benchmarks/engine.py.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from engine import Arm, arms_for, best_assisted, one_repeat, ratio
from pairs import machine, opened, options, record
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from hf_lossy_assist.evaluation.arms import make_static_writer
from hf_lossy_assist.models.facts import CACHE


class Text(NamedTuple):
    sequences: torch.Tensor


class TargetLoop:
    """Greedy decoding with one compiled function per token, without processors; it stops at the end token or the length."""

    def __init__(self, model: Any, capacity: int, ends: set[int], mode: str | None):
        self.model, self.capacity, self.ends = (
            model,
            capacity,
            torch.tensor(sorted(ends), dtype=torch.int64, device=model.device),
        )
        self.step = torch.compile(self._step, mode=mode, dynamic=False, fullgraph=True)
        self.caches: dict[int, StaticCache] = {}

    def _step(
        self, token: torch.Tensor, mask: torch.Tensor, position: torch.Tensor, column: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """Return the next tokens (B, 1) after (B, 1) tokens at `column` of the cache. `mask` (B, capacity) is False for padding."""
        seen = mask & (torch.arange(self.capacity, device=mask.device) <= column)
        additive = torch.zeros(seen.shape, dtype=self.model.dtype, device=mask.device).masked_fill(
            ~seen, torch.finfo(self.model.dtype).min
        )
        out = self.model(
            input_ids=token,
            position_ids=position,
            attention_mask=additive[:, None, None],
            **{CACHE: cache},
            use_cache=True,
        )
        return out.logits[:, -1].argmax(dim=-1, keepdim=True)

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, max_new_tokens: int, **_: Any) -> Text:
        batch, width = input_ids.shape
        cache = self.caches.setdefault(batch, StaticCache(config=self.model.config, max_cache_len=self.capacity))
        cache.reset()
        mask = torch.ones(batch, self.capacity, dtype=torch.bool, device=input_ids.device)
        mask[:, :width] = attention_mask.bool()
        positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        with torch.no_grad():
            first = self.model(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=attention_mask,
                **{CACHE: cache},
                use_cache=True,
            )
            token = first.logits[:, -1].argmax(dim=-1, keepdim=True)
            new, done = [token], torch.isin(token, self.ends)
            position = positions[:, -1:] + 1
            for i in range(max_new_tokens - 1):
                if bool(done.all()):
                    break
                token = self.step(
                    token, mask, position + i, torch.tensor(width + i, device=token.device), cache
                ).clone()
                new.append(token)
                done |= torch.isin(token, self.ends)
        return Text(torch.cat([input_ids, *new], dim=1))


def compiled_arms(target: Any, draft: Any, args: argparse.Namespace, ends: set[int]) -> list[Arm]:
    """Return the arms of benchmarks/engine.py, each with its compiled form."""
    how = CompileConfig(mode=args.mode)
    loop = TargetLoop(target, args.capacity, ends, args.mode)
    whole = make_static_writer(target, args.capacity, args.mode)

    def ours(policy: str, **settings: Any) -> Callable[..., Any]:
        return lambda **kwargs: target.generate(assistant_model=draft, lossy_policy=policy, **settings, **kwargs)

    arms = [
        arm
        for arm in arms_for(target, draft, args)
        if arm.name.startswith(("target", "assisted γ")) and arm.batch_size in args.batch_sizes
    ]
    policies = {
        f"strict γ={gamma}": ("strict", {"num_assistant_tokens": gamma}) for gamma in args.lengths or [args.gamma]
    }
    policies |= {name: (name, {}) for name in args.policies}
    forms = {"": {}, " compiled": {"compile_config": how}}
    for size in args.batch_sizes:
        arms += [Arm("target static", size, whole), Arm("target loop", size, loop)]
        for name, (policy, settings) in policies.items():
            arms += [Arm(name + form, size, ours(policy, **settings, **options)) for form, options in forms.items()]
    return sorted(arms, key=lambda arm: arm.batch_size)


def warm_up(
    arms: list[Arm], tokenizer: Any, prompts: list[str], args: argparse.Namespace, ends: set[int]
) -> dict[int, float]:
    """Let every arm run every prompt once; return the seconds of each, by its index in `arms`."""
    took = {}
    for k, arm in enumerate(arms):
        began = time.perf_counter()
        one_repeat([arm], tokenizer, prompts, args, ends)
        arm.speeds.clear()
        took[k] = time.perf_counter() - began
    return took


def summarize(arm: Arm, arms: list[Arm], warm: float) -> dict[str, Any]:
    """Return the figures of one arm."""
    beside = {a.name: a for a in arms if a.batch_size == arm.batch_size}
    targets = [a for a in beside.values() if a.name.startswith("target")]
    alone = max(targets, key=lambda a: statistics.median(a.speeds))
    name = arm.name.removesuffix(" compiled")
    eager, compiled = beside.get(name, arm), beside.get(f"{name} compiled", arm)
    faster = max((eager, compiled), key=lambda a: statistics.median(a.speeds))
    texts = zip(arm.texts, beside["target"].texts, strict=True)
    return {
        "arm": arm.name,
        "batch_size": arm.batch_size,
        "tokens_per_second": round(statistics.median(arm.speeds), 1),
        "lowest": round(min(arm.speeds), 1),
        "highest": round(max(arm.speeds), 1),
        "over_eager": ratio(arm, eager),
        "over_better_form": ratio(arm, faster),
        "over_best_target": ratio(arm, alone),
        "best_target": alone.name,
        "over_assisted": ratio(arm, best_assisted(arms)),
        "texts_equal_to_target": sum(a == b for a, b in texts) / len(arm.texts),
        "warm_up_seconds": round(warm, 1),
    }  # fmt: skip


def main() -> None:
    parser = options(__doc__, seed=777)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 4, 8, 32])
    parser.add_argument("--lengths", type=int, nargs="*", help="constant draft lengths (default: --gamma)")
    parser.add_argument(
        "--policies",
        nargs="*",
        default=["svip"],
        help="lossless ones beside strict; svip compiles five graphs for each number of rows",
    )
    parser.add_argument("--capacity", type=int, default=256, help="slots of the target's own static cache")
    parser.add_argument("--mode", help="of torch.compile, for every arm that is compiled")
    args = parser.parse_args()
    if 1 not in args.batch_sizes:
        parser.error("--batch-sizes: 1 is needed: Transformers' assisted generation does one row at a time")

    target, draft, tokenizer, prompts, ends = opened(args)
    arms = compiled_arms(target, draft, args, ends)
    took = warm_up(arms, tokenizer, prompts, args, ends)
    known = counters["stats"]["unique_graphs"]
    for _ in range(args.repeats):
        one_repeat(arms, tokenizer, prompts, args, ends)
    again = counters["stats"]["unique_graphs"] - known

    where = machine(args.device)
    rows = [summarize(arm, arms, took[k]) for k, arm in enumerate(arms)]
    title = f"{where}; compiled again after the warm-up: {again}"
    table = Table(
        "arm",
        "batch",
        "tokens/s",
        "range",
        "× eager",
        "× better form",
        "× best target",
        "× assisted",
        "equal",
        "warm-up, s",
        title=title,
    )
    for r in rows:
        table.add_row(
            str(r["arm"]), str(r["batch_size"]), str(r["tokens_per_second"]), f"{r['lowest']}–{r['highest']}", str(r["over_eager"]),
            str(r["over_better_form"]), str(r["over_best_target"]), str(r["over_assisted"]), f"{r['texts_equal_to_target']:.0%}", str(r["warm_up_seconds"]),
        )  # fmt: skip
    Console(width=130).print(table)
    record(args, where, arms=rows, compiled_again=again)


if __name__ == "__main__":
    main()
