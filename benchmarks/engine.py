"""Measure tokens per second of this engine against Transformers' own, all arms interleaved in one run.

    python benchmarks/engine.py                                              # the demo pair, CPU
    python benchmarks/engine.py --model M --assistant D --prompts gsm8k.jsonl --chat --problems 8 --max-new-tokens 64
    python benchmarks/engine.py --device cuda --dtype bfloat16 --json out.json
    python benchmarks/engine.py --policies constant:gamma=5 joint_goodput --width 4096 --noise 0.5    # the target and these, by batch size
    python benchmarks/engine.py --mixes copying prose code --batch-sizes 1 8 # drafter="auto" and a fallback beside each fixed drafter

Arms at batch 1: `target` (Transformers' generate alone), `assisted γ` (Transformers' assisted generation with
num_assistant_tokens=γ, schedule "constant", confidence threshold 0; from Transformers 5.24 also compiled on a static cache), `assisted default` (the same with Transformers' defaults:
20 tokens, threshold 0.4, refitted every round if scikit-learn is installed), `strict γ` and `svip` (ours), `oracle γ` (strict, with the target's own text as draft: the most that any draft can bring). Then `target`,
`strict γ` and `svip` in batches. In every repeat each arm runs all prompts once. Arms of one batch size take turns at each
batch, in an order that rotates. Figures are medians over the repeats, ratios the medians of the ratios within a repeat. Greedy; a
row counts its tokens up to and including its end token. With --mixes the arms are drafters under svip (none: the target alone, suffix: under a constant
16), and documents are given as `hints=`: of a "copying" mix the texts that will be written, of "code" those of other prompts, of "prose" none.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from pairs import machine, opened, options, record, synchronize
from rich.console import Console
from rich.table import Table

import hf_lossy_assist as hla
from hf_lossy_assist.batch.suffix_memory import IndexedText, SuffixMemory
from hf_lossy_assist.drafters.suffix import LONGEST_MATCH, SuffixDrafter
from hf_lossy_assist.evaluation.arms import (
    STATIC_DRAFTS,
    make_assisted_writer,
    static_settings,
    why_not_static,
)
from hf_lossy_assist.stats.speculation import SpeculationStats


class Arm:
    """One way to continue prompts, `batch_size` at a time, with the seconds and tokens of the current repeat."""

    def __init__(
        self,
        name: str,
        batch_size: int,
        generate: Callable[..., Any],
        prepare: Callable[..., None] | None = None,
    ):
        """`prepare`: run with the arguments of `generate` before the clock starts."""
        self.name, self.batch_size, self.generate, self.prepare = name, batch_size, generate, prepare
        self.speeds: list[float] = []  # tokens per second of each repeat
        self.begin()

    def begin(self) -> None:
        self.tokens, self.seconds = 0, 0.0
        self.texts: list[tuple[int, ...]] = []
        self.calls: list[SpeculationStats] = []

    def run(self, tokenizer: Any, prompts: list[str], args: argparse.Namespace, ends: set[int]) -> None:
        """Continue one batch of prompts."""
        inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(args.device)
        inputs.pop("token_type_ids", None)
        inputs |= {"max_new_tokens": args.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
        if self.prepare is not None:
            self.prepare(**inputs)
        synchronize(args.device)
        began = time.perf_counter()
        out = self.generate(**inputs)
        synchronize(args.device)
        self.seconds += time.perf_counter() - began
        self.calls += [out.speculation] if getattr(out, "speculation", None) else []
        for row in out.sequences[:, inputs["input_ids"].shape[1] :].tolist():
            end = next((j + 1 for j, token in enumerate(row) if token in ends), len(row))
            self.texts.append(tuple(row[:end]))
            self.tokens += end


def one_repeat(arms: list[Arm], tokenizer: Any, prompts: list[str], args: argparse.Namespace, ends: set[int]) -> None:
    """Let every arm run every prompt once; arms of one batch size take turns at each batch, in an order that rotates."""
    for arm in arms:
        arm.begin()
    for size in sorted({arm.batch_size for arm in arms}):
        same = [arm for arm in arms if arm.batch_size == size]
        for turn, start in enumerate(range(0, len(prompts), size)):
            shift = turn % len(same)
            for arm in same[shift:] + same[:shift]:
                arm.run(tokenizer, prompts[start : start + size], args, ends)
    for arm in arms:
        arm.speeds.append(arm.tokens / arm.seconds)


def warm_up(arms: list[Arm], tokenizer: Any, prompts: list[str], args: argparse.Namespace, ends: set[int]) -> None:
    """Run one repeat that is not counted."""
    one_repeat(arms, tokenizer, prompts, args, ends)
    for arm in arms:
        arm.speeds.clear()


def ratio(arm: Arm, other: Arm) -> float:
    """Return the median over the repeats of the speed of `arm` relative to another in the same repeat."""
    return round(statistics.median(a / b for a, b in zip(arm.speeds, other.speeds, strict=True)), 3)


def make_oracle_arm(target: Any, gamma: int) -> Arm:
    """Return the arm of drafts that are always right: the next `gamma` tokens of the target's greedy text, written before.

    They are wrong only where a text repeats its last 64 tokens and then continues differently.
    """
    memory = SuffixMemory()
    drafter = SuffixDrafter(1, LONGEST_MATCH, float(gamma), gamma, memory)

    def prepare(**settings: Any) -> None:
        memory.clear()
        sequences = type(target).generate(target, **settings).sequences
        starts = settings["attention_mask"].argmax(dim=1).tolist()
        for row, start in zip(sequences.tolist(), starts, strict=True):
            text = IndexedText(drafter.min_match, drafter.max_match)
            text.extend(row[start:])
            memory.add(text)

    def write(**settings: Any) -> Any:
        return target.generate(
            assistant_model=drafter,
            lossy_policy="strict",
            num_assistant_tokens=gamma,
            disable_compile=True,
            **settings,
        )

    return Arm(f"oracle γ={gamma}", 1, write, prepare)


def arms_for(target: Any, draft: Any, args: argparse.Namespace) -> list[Arm]:
    gamma, plain = args.gamma, type(target).generate

    def ours(policy: str, **settings: Any) -> Callable[..., Any]:
        return lambda **kwargs: target.generate(assistant_model=draft, lossy_policy=policy, **settings, **kwargs)

    def alone(**kwargs: Any) -> Any:
        return plain(target, **kwargs)

    fixed = {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    arms = [
        Arm("target", 1, alone),
        Arm(f"assisted γ={gamma}", 1, make_assisted_writer(target, draft, fixed)),
        Arm("assisted default", 1, make_assisted_writer(target, draft, {})),
        Arm(f"strict γ={gamma}", 1, ours("strict", num_assistant_tokens=gamma)),
        Arm("svip", 1, ours("svip")),
    ]
    arms.append(make_oracle_arm(target, gamma))
    if STATIC_DRAFTS and not why_not_static(target):
        compiled = make_assisted_writer(target, draft, fixed, **static_settings(getattr(args, "mode", None)))
        arms.insert(2, Arm(f"assisted γ={gamma} compiled", 1, compiled))
    for size in args.batch_sizes:
        if size > 1:
            arms.append(Arm("target", size, alone))
            arms.append(Arm(f"strict γ={gamma}", size, ours("strict", num_assistant_tokens=gamma)))
            arms.append(Arm("svip", size, ours("svip")))
    return arms


def policy_arms(target: Any, draft: Any, args: argparse.Namespace) -> list[Arm]:
    """Return the target and each of `args.policies`, at every batch size."""

    def ours(policy: str) -> Callable[..., Any]:
        return lambda **kwargs: target.generate(assistant_model=draft, lossy_policy=policy, **kwargs)

    writers = {"target": lambda **kwargs: type(target).generate(target, **kwargs)}
    writers |= {policy: ours(policy) for policy in args.policies}
    return [Arm(name, size, write) for size in args.batch_sizes for name, write in writers.items()]


DRAFTERS: dict[str, dict[str, Any]] = {
    "suffix": {"drafter": "suffix", "lossy_policy": "strict", "num_assistant_tokens": 16},
    "model": {},
    "composite": {"drafter": "composite"},
    "composite, fallback": {"drafter": "composite", "lossy_policy": hla.as_policy("svip").with_fallback()},
    "auto": {"drafter": "auto"},
}
FIXED = ("target", "suffix", "model", "composite")  # that choose nothing in a call


def compare_mixes(pair: tuple[Any, Any, Any], prompts: list[str], args: argparse.Namespace, ends: set[int]) -> None:
    """Print the speeds of the drafters on each mix of documents, and each relative to the fastest that chooses nothing."""
    target, draft, tokenizer = pair
    plain = Arm("svip", 1, lambda **kwargs: target.generate(assistant_model=draft, lossy_policy="svip", **kwargs))
    for prompt in prompts:
        plain.run(tokenizer, [prompt], args, ends)
    ids = [tuple(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    table = Table(
        "mix", "batch", "arm", "tokens/s", "range", "× target", "× best fixed", "equal", title=machine(args.device)
    )
    rows: list[dict[str, Any]] = []
    for mix in args.mixes:
        shift = {"copying": 0, "code": 1, "prose": 0}[mix]
        texts = [list(text) if mix != "prose" else [] for text in plain.texts[shift:] + plain.texts[:shift]]
        documents = dict(zip(ids, texts, strict=True))

        def ours(
            hinted: bool, documents: dict[tuple[int, ...], list[int]] = documents, **settings: Any
        ) -> Callable[..., Any]:
            def generate(**kwargs: Any) -> Any:
                pairs = zip(kwargs["input_ids"].tolist(), kwargs["attention_mask"].sum(dim=1).tolist(), strict=True)
                hints = [documents[tuple(row[len(row) - n :])] for row, n in pairs] if hinted else None
                return target.generate(hints=hints, **settings, **kwargs)

            return generate

        for size in args.batch_sizes:
            arms = [Arm("target", size, lambda **kwargs: type(target).generate(target, **kwargs))]
            for name, settings in DRAFTERS.items():
                used = {"lossy_policy": "svip"} | ({} if name == "suffix" else {"assistant_model": draft}) | settings
                arms.append(Arm(name, size, ours(name != "model", **used)))
            warm_up(arms, tokenizer, prompts[: 2 * size], args, ends)
            for _ in range(args.repeats):
                one_repeat(arms, tokenizer, prompts, args, ends)
            best = max((a for a in arms if a.name in FIXED), key=lambda arm: statistics.median(arm.speeds))
            for arm in arms:
                row = summarize(arm, [arms[0], arms[0], *arms]) | {"mix": mix, "over_best_fixed": ratio(arm, best)}
                rows.append(row)
                table.add_row(
                    mix, str(size), arm.name, str(row["tokens_per_second"]), f"{row['lowest']}–{row['highest']}", str(row["over_target"]),
                    str(row["over_best_fixed"]), f"{row['texts_equal_to_target']:.0%}",
                )  # fmt: skip
    Console(width=120).print(table)
    record(args, machine(args.device), arms=rows)


def best_assisted(arms: list[Arm]) -> Arm:
    """Return the fastest form of Transformers' assisted generation, or the first arm where there is none."""
    forms = [arm for arm in arms if arm.name.startswith("assisted")]
    return max(forms, key=lambda arm: statistics.median(arm.speeds), default=arms[0])


def summarize(arm: Arm, arms: list[Arm]) -> dict[str, Any]:
    """Return the figures of one arm."""
    target, assisted = arms[0], best_assisted(arms)
    alone = next((a for a in arms if a.name == arm.name and a.batch_size == 1), arm)
    stats = SpeculationStats.merge(arm.calls) if arm.calls else None
    return {
        "arm": arm.name,
        "batch_size": arm.batch_size,
        "tokens_per_second": round(statistics.median(arm.speeds), 1),
        "lowest": round(min(arm.speeds), 1),
        "highest": round(max(arm.speeds), 1),
        "over_target": ratio(arm, target),
        "over_assisted": ratio(arm, assisted),
        "over_batch_1": ratio(arm, alone),
        "texts_equal_to_target": sum(a == b for a, b in zip(arm.texts, target.texts, strict=True)) / len(arm.texts),
        "mean_acceptance_length": round(stats.mean_acceptance_length, 3) if stats else None,
        "draft_acceptance_rate": round(stats.draft_acceptance_rate, 4) if stats else None,
        "forwards": stats.forwards if stats else None,
    }


def show_by_batch(arms: list[Arm], args: argparse.Namespace) -> None:
    """Print each arm's figures relative to the first of its batch size, and write them to `args.json`."""
    table = Table(
        "arm", "batch", "tokens/s", "range", "× target", "equal", "accepted", "a call", title=machine(args.device)
    )
    rows = []
    for size in sorted({arm.batch_size for arm in arms}):
        same = [arm for arm in arms if arm.batch_size == size]
        for arm in same:
            r = summarize(arm, [same[0], same[0], *arms])
            rows.append(r)
            accepted = "" if r["draft_acceptance_rate"] is None else f"{r['draft_acceptance_rate']:.1%}"
            table.add_row(
                arm.name, str(size), str(r["tokens_per_second"]), f"{r['lowest']}–{r['highest']}", str(r["over_target"]),
                f"{r['texts_equal_to_target']:.0%}", accepted, str(r["mean_acceptance_length"] or ""),
            )  # fmt: skip
    Console(width=120).print(table)
    record(args, machine(args.device), arms=rows)


def main() -> None:
    parser = options(__doc__, seed=777)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 4, 8, 16, 32])
    parser.add_argument(
        "--policies", nargs="+", help="compare these with the target alone, in place of the arms above"
    )
    parser.add_argument("--mixes", nargs="+", choices=["copying", "prose", "code"], help="compare drafters on these")
    args = parser.parse_args()

    target, draft, tokenizer, prompts, ends = opened(args)
    if args.mixes:
        compare_mixes((target, draft, tokenizer), prompts, args, ends)
        return
    arms = policy_arms(target, draft, args) if args.policies else arms_for(target, draft, args)
    warm_up(arms, tokenizer, prompts if args.policies else prompts[:2], args, ends)
    for _ in range(args.repeats):
        one_repeat(arms, tokenizer, prompts, args, ends)
    if args.policies:
        return show_by_batch(arms, args)

    where = machine(args.device)
    rows = [summarize(arm, arms) for arm in arms]
    table = Table(
        "arm", "batch", "tokens/s", "range", "× target", "× assisted", "× batch 1", "equal", "accepted", title=where
    )
    for r in rows:
        accepted = "" if r["draft_acceptance_rate"] is None else f"{r['draft_acceptance_rate']:.1%}"
        table.add_row(
            str(r["arm"]), str(r["batch_size"]), str(r["tokens_per_second"]), f"{r['lowest']}–{r['highest']}", str(r["over_target"]),
            str(r["over_assisted"]), str(r["over_batch_1"]), f"{r['texts_equal_to_target']:.0%}", accepted,
        )  # fmt: skip
    Console(width=120).print(table)
    record(args, where, arms=rows)


if __name__ == "__main__":
    main()
