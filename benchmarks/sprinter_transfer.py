"""Does a verifier trained on one variant of the task serve another? The paper's Table 4 on two variants of the demo task.

    python benchmarks/sprinter_transfer.py

Variants: problems whose two steps both add, and problems whose two steps both subtract. For each, prompts of the calibration split are
collected, heads fitted, and measured on data of the other split (test, another seed) of both variants: AUROC for three λ, and
with `Sprinter` at one threshold tokens per target call, speed, right answers. The shipped head is measured on the whole task, on a seed
that no head has seen. Greedy, batch 1; arms interleaved, one pass.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from engine import Arm, one_repeat
from rich.console import Console
from rich.table import Table

import hf_lossy_assist as hla
from hf_lossy_assist.methods.sprinter.collect import collect
from hf_lossy_assist.methods.sprinter.collect_settings import CollectSettings
from hf_lossy_assist.methods.sprinter.figures import measure
from hf_lossy_assist.methods.sprinter.fit import fit_head
from hf_lossy_assist.methods.sprinter.train import FitSettings
from hf_lossy_assist.stats.report import SpeculationStats
from hf_lossy_assist.tasks.demo import GAINS, LOSSES, Problem, stream
from hf_lossy_assist.tasks.prompts import Text
from hf_lossy_assist.training.dataset import read_table


VERBS = {"additions": GAINS, "subtractions": LOSSES}
LAMBDAS = (1.0, 1.2, 1.5)


def variant(name: str | None, split: str, seed: int, count: int) -> list[Problem]:
    """The first `count` problems of a stream in which both steps use verbs of the variant."""
    found: list[Problem] = []
    for problem in stream(split, seed):
        words = problem.prompt.replace(".", "").split()
        if name is None or sum(word in VERBS[name] for word in words) == 2:
            found.append(problem)
        if len(found) == count:
            break
    return found


def data(problems: list[Problem], models: hla.demo.Demo, folder: Path, seed: int) -> Any:
    texts = [Text(p.prompt, p.solution) for p in problems]
    settings = CollectSettings(batch_size=16, seed=seed)
    return read_table(collect(models.target, models.draft, models.tokenizer, texts, folder, settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=192, help="prompts of each variant to train on")
    parser.add_argument("--test", type=int, default=48, help="prompts of each variant to measure on")
    parser.add_argument("--head", default="mlp", help="linear or mlp")
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=11, help="of the measured problems")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    models, console = hla.demo.load(), Console(width=140)
    hla.enable(models.target)
    run = argparse.Namespace(device="cpu", max_new_tokens=96)
    ends = {models.target.generation_config.eos_token_id}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        trained, tested = {}, {}
        for name in VERBS:
            table = data(variant(name, "calibration", 5, args.train), models, Path(made, f"{name}-train"), 1)
            trained[name] = {lam: fit_head(table, lam, FitSettings(kind=args.head))[0] for lam in LAMBDAS}
            tested[name] = data(variant(name, "test", args.seed, args.test), models, Path(made, f"{name}-test"), 2)
        whole = data(variant(None, "test", args.seed, args.test), models, Path(made, "whole-test"), 2)
        shipped = {f"{lam:g}": measure(hla.demo.head(), whole, lam).auroc for lam in LAMBDAS}

    for measured_on, table in tested.items():
        problems = variant(measured_on, "test", args.seed, args.test)
        prompts = [p.prompt for p in problems]
        arms = []
        for trained_on, heads in trained.items():
            policy = hla.Sprinter(heads[1.2], args.threshold)

            def generate(policy: hla.LossyPolicy = policy, **kwargs: Any) -> Any:
                return models.target.generate(assistant_model=models.draft, lossy_policy=policy, **kwargs)

            arms.append(Arm(trained_on, 1, generate))
        one_repeat(arms, models.tokenizer, prompts[:2], run, ends)
        one_repeat(arms, models.tokenizer, prompts, run, ends)
        for arm in arms:
            stats = SpeculationStats.merge(arm.calls)
            texts = [models.tokenizer.decode(text) for text in arm.texts]
            rows.append(
                {
                    "measured on": measured_on,
                    "trained on": arm.name,
                    **{
                        f"AUROC λ={lam:g}": round(measure(trained[arm.name][lam], table, lam).auroc, 3)
                        for lam in LAMBDAS
                    },
                    "tokens / call": round(stats.mean_acceptance_length, 2),
                    "tokens/s": round(arm.speeds[-1], 1),
                    "right": round(
                        statistics.mean(hla.demo.answer(t) == p.answer for t, p in zip(texts, problems, strict=True)),
                        3,
                    ),
                }
            )
    shown = Table(*rows[0], title=f"{args.head} heads, τ = {args.threshold:g}, 96 new tokens")
    for row in rows:
        shown.add_row(*map(str, row.values()))
    console.print(shown)
    console.print(f"shipped head, whole task, test problems of seed {args.seed}: AUROC " + ", ".join(
        f"{value:.3f} (λ = {lam})" for lam, value in shipped.items()
    ))  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "shipped": shipped}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
