"""Compare continuous batching (`generate_many`) with fixed batches of the same size, in the given order and sorted by length.

    python benchmarks/many.py                                # 400 demo problems, 32 rows
    python benchmarks/many.py --model M --assistant D --prompts questions.jsonl --chat --problems 100 --rows 8

Greedy; all arms take turns within each repeat, after a warm-up of one batch each. "sorted": by the length of the prompt, which is all that is known
beforehand; "sorted by text": by the length of the output, which is not. Ratios are medians of the ratios within a repeat.
The demo's outputs have one length, so each gets a random longest length, which only "sorted by text" knows. Latencies of continuous
batching run from insertion to the end; in a fixed batch each row waits for the longest. Storage: the largest capacity
of the target's caches in tokens, including the prefetched prompts.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pairs import machine, opened, options, record, synchronize
from rich.console import Console
from rich.table import Table

import hf_lossy_assist as hla
from hf_lossy_assist.generation.scheduler import AHEAD, Scheduler
from hf_lossy_assist.models.row_cache import SPARE


@dataclass
class Arm:
    """A way to process all prompts; it returns the new tokens of each."""

    name: str
    policy: str
    write: Callable[[], list[list[int]]]
    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        tokens = sum(map(len, self.texts))
        return [tokens / seconds for seconds in self.seconds]


@dataclass
class Work:
    """The prompts to process. longest: most new tokens of each."""

    pair: Any
    prompts: list[str]
    longest: list[int]
    rows: int
    ends: set[int]


def in_batches(work: Work, policy: str | None, order: list[int]) -> list[list[int]]:
    """Process `rows` prompts per call, in this order; a call runs until its longest sequence ends, and the others are cut."""
    pair, prompts, rows, ends = work.pair, work.prompts, work.rows, work.ends
    target, draft, tokenizer = pair
    texts: list[list[int]] = [[]] * len(prompts)
    more = {} if policy is None else {"assistant_model": draft, "lossy_policy": policy}
    for start in range(0, len(order), rows):
        these = order[start : start + rows]
        inputs = tokenizer([prompts[n] for n in these], return_tensors="pt", padding=True).to(target.device)
        inputs.pop("token_type_ids", None)
        out = target.generate(**inputs, max_new_tokens=max(work.longest[n] for n in these), do_sample=False, **more)
        new = out[:, inputs["input_ids"].shape[1] :]
        tokenizer.batch_decode(new, skip_special_tokens=True)  # `generate_many` gives texts, too
        for n, ids in zip(these, new.tolist(), strict=True):
            ids = ids[: work.longest[n]]
            texts[n] = next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)
    return texts


def flowing(work: Work, policy: str, latencies: list[float]) -> list[list[int]]:
    """Run `rows` sequences in flight, each with its most new tokens."""
    target, draft, tokenizer = work.pair
    texts: list[list[int]] = [[]] * len(work.prompts)
    prompts = [{"prompt": text, "max_new_tokens": n} for text, n in zip(work.prompts, work.longest, strict=True)]
    latencies.clear()
    for result in hla.generate_many(
        target, prompts, assistant_model=draft, lossy_policy=policy, tokenizer=tokenizer, max_rows=work.rows,
        max_new_tokens=max(work.longest), do_sample=False,
    ):  # fmt: skip
        texts[result.index] = result.token_ids
        latencies.append(result.seconds)
    return texts


class Storage:
    """The largest size of the target's cache: rows × columns."""

    def __init__(self) -> None:
        self.most, self._step = 0, Scheduler.step

    def __enter__(self) -> "Storage":
        Scheduler.step = lambda scheduler: self._look(scheduler, self._step(scheduler))  # type: ignore
        return self

    def __exit__(self, *_: object) -> None:
        Scheduler.step = self._step  # type: ignore[method-assign]

    def _look(self, scheduler: Any, out: Any) -> Any:
        calls = [scheduler.call, None if scheduler.block is None else scheduler.block.call]
        layers = [call.target.cache.layers[0] for call in calls if call is not None]
        held = [layer.keys for layer in layers if layer.is_initialized]
        self.most = max(self.most, sum(keys.shape[0] * keys.shape[2] for keys in held))
        return out


def main() -> None:
    parser = options(__doc__, problems=400)
    parser.add_argument("--rows", type=int, default=32, help="texts at a time (default %(default)s)")
    parser.add_argument("--policies", nargs="+", default=["strict", "svip"])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument(
        "--shortest",
        type=int,
        default=4,
        help="each text may have so many new tokens to --max-new-tokens, drawn alike",
    )
    parser.add_argument(
        "--clock",
        choices=["perf_counter", "process_time"],
        default="perf_counter",
        help="process_time with OMP_NUM_THREADS=1 gives ratios on a machine that others use",
    )
    args = parser.parse_args()
    clock = getattr(time, args.clock)
    target, draft, tokenizer, prompts, ends = opened(args)
    rows, given = args.rows, list(range(len(prompts)))
    draw = np.random.default_rng(args.seed)
    drawn = {text: int(draw.integers(args.shortest, args.max_new_tokens + 1)) for text in prompts}
    longest = [drawn[text] for text in prompts]  # of a prompt that comes twice, the same
    work = Work((target, draft, tokenizer), prompts, longest, rows, ends)
    widths = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    first = in_batches(work, None, given)  # which warms up, and says how long each text is
    orders = {
        "fixed": given,
        "sorted": sorted(given, key=lambda n: -widths[n]),
        "sorted by text": sorted(given, key=lambda n: -len(first[n])),
    }
    latencies: dict[str, list[float]] = {policy: [] for policy in args.policies}
    arms = [
        Arm(
            f"target alone, {name}",
            "target",
            lambda order=order: in_batches(work, None, order),  # type: ignore[misc]
        )
        for name, order in orders.items()
    ]
    for policy in args.policies:
        for name, order in orders.items():
            arms.append(Arm(name, policy, lambda policy=policy, order=order: in_batches(work, policy, order)))  # type: ignore[misc]  # fmt: skip
        arms.append(Arm("in flight", policy, lambda policy=policy: flowing(work, policy, latencies[policy])))  # type: ignore[misc]  # fmt: skip
    for policy in args.policies:
        in_batches(work, policy, given[:rows])
        flowing(Work(work.pair, prompts[: 2 * rows], longest[: 2 * rows], rows, ends), policy, [])
    with Storage() as storage:
        for repeat in range(args.repeats):
            for place in range(len(arms)):
                arm = arms[(place + repeat) % len(arms)]
                synchronize(args.device)
                began = clock()
                arm.texts = arm.write()
                synchronize(args.device)
                arm.seconds.append(clock() - began)

    found: list[dict[str, Any]] = []
    for arm in arms:
        same = [other for other in arms if other.policy == arm.policy and other.name in orders]
        best = min(same, key=lambda other: statistics.median(other.seconds), default=arm)
        known = min((other for other in same if other.name != "sorted by text"), key=lambda other: statistics.median(other.seconds), default=arm)  # fmt: skip
        ratios = {
            name: statistics.median(b / a for a, b in zip(arm.seconds, other.seconds, strict=True))
            for name, other in (("of_best", best), ("of_best_known", known), ("of_target", arms[0]))
        }
        found.append(
            {"arm": arm.name, "policy": arm.policy, "tokens_per_second": statistics.median(arm.speeds), "lowest": min(arm.speeds),
             "highest": max(arm.speeds), "equal": sum(a == b for a, b in zip(arm.texts, first, strict=True)), **ratios}
        )  # fmt: skip
    table = Table("policy", "arm", "tok/s", "range", "× best fixed", "× best fixed, unknown lengths", "× target", "texts equal")  # fmt: skip
    for r in found:
        table.add_row(
            r["policy"], r["arm"], f"{r['tokens_per_second']:.0f}", f"{r['lowest']:.0f}–{r['highest']:.0f}",
            f"{r['of_best']:.2f}", f"{r['of_best_known']:.2f}", f"{r['of_target']:.2f}", f"{r['equal']} of {len(prompts)}",
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    lengths = np.percentile([len(ids) for ids in first], [0, 25, 50, 75, 100])
    most = max(width + len(ids) for width, ids in zip(widths, first, strict=True))
    console.print(f"{machine(args.device)}; new tokens of a text, quartiles: {' '.join(f'{n:.0f}' for n in lengths)}")
    console.print(
        f"largest storage {storage.most} tokens; {rows} rows × the longest text are {rows * most}, with {SPARE} spare places each "
        f"{rows * (most + SPARE)}, and up to {AHEAD} tokens are read ahead"
    )
    waits = {}
    for policy, seconds in latencies.items():
        waits[policy] = [float(value) for value in np.percentile(seconds, [50, 95, 100])]
        console.print(f"{policy} in flight, seconds of a text: median {waits[policy][0]:.2f}, 95 % {waits[policy][1]:.2f}, longest {waits[policy][2]:.2f}")  # fmt: skip
    record(args, machine(args.device), results=found, storage=storage.most, rows_times_longest=rows * most, latencies=waits)  # fmt: skip


if __name__ == "__main__":
    main()
