"""Compare the papers' methods on an EAGLE-3 drafter and on a draft model: acceptance, tokens a call, right answers, tokens per second.

    python benchmarks/drafter_methods.py                             # fits into a temporary folder: some minutes
    python benchmarks/drafter_methods.py --work fitted               # keeps the fitted heads and uses them again
    python benchmarks/drafter_methods.py --small --problems 8        # a minute, only to test the script
    python benchmarks/drafter_methods.py --pair runs/hybrid          # another target and draft model of the demo's task, and no drafter

On the demo's models. For the drafter, heads are fitted on calibration problems by the functions of `hf-lossy collect --drafter demo`,
`fit`, `mine` and `profile`. The draft model has the shipped heads and profile, which were fitted on more. A method that cannot be fitted
is left out with its reason. The arms run one after the other on each batch of problems, as in `hf-lossy compare`.
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.loading import load_model
from hf_lossy_assist.drafters.trained import PLACES
from hf_lossy_assist.evaluation.arms import TARGET, Arm, make_arms
from hf_lossy_assist.evaluation.comparison import compare_arms, list_batches
from hf_lossy_assist.evaluation.metrics import ArmMetrics
from hf_lossy_assist.evaluation.writer import DecodingSettings, TextWriter
from hf_lossy_assist.methods.autojudge.classifiers import JudgeSettings
from hf_lossy_assist.methods.autojudge.fit import fit_autojudge
from hf_lossy_assist.methods.autojudge.mine import mine
from hf_lossy_assist.methods.autojudge.mining_loop import MineSettings
from hf_lossy_assist.methods.sprinter.collect import collect
from hf_lossy_assist.methods.sprinter.collect_runner import CollectSettings
from hf_lossy_assist.methods.sprinter.fit import fit_sprinter
from hf_lossy_assist.methods.sprinter.specdec_fit import fit_specdec
from hf_lossy_assist.methods.sv.profiled_runner import ProfileSettings
from hf_lossy_assist.methods.sv.profiling import profile
from hf_lossy_assist.tasks.demo_task import problems
from hf_lossy_assist.tasks.load import DemoTask, load_task
from hf_lossy_assist.tasks.prompts import PromptText


GAMMA, WINDOW = 5, 8  # drafted tokens; AutoJudge's on EAGLE-2 (its Appendix J)
MANY, FEW = 128, 24  # prompts that heads are fitted on
MINED = 4  # times as many problems are mined: of each few tokens differ


class Fits:
    """The heads and profiles of the drafter, each in a folder of `work`; an existing one is used as it is."""

    def __init__(self, models: hla.demo.Demo, drafter: Any, work: Path, prompts: int, seed: int):
        self.models, self.drafter, self.work, self.seed = models, drafter, work, seed
        self.places = 1 if isinstance(drafter, PreTrainedModel) else PLACES
        self.texts = [
            PromptText(problem.prompt, problem.solution) for problem in problems(prompts, seed, "calibration")
        ]

    @property
    def pair(self) -> tuple[Any, Any, Any]:
        return self.models.target, self.drafter, self.models.tokenizer

    def head(self, method: str) -> hla.Head:
        """Fit SPRINTER's or SpecDec++'s head on the drafter's own states."""
        data, out = self.work / f"{method}-data", self.work / method
        if not out.exists():
            more: dict[str, Any] = (
                {} if method == "sprinter" else {"mix": 0.15, "features": hla.FeatureSpec(position="token")}
            )
            settings = CollectSettings(places=self.places, seed=self.seed, **more)
            if not data.exists():
                collect(*self.pair, self.texts, data, settings)
            (fit_sprinter if method == "sprinter" else fit_specdec)(data, out)
        return hla.Head.from_pretrained(out)

    def judge(self) -> hla.Head:
        """Fit AutoJudge's head on the target's states."""
        data, out, task = self.work / "autojudge-data", self.work / "autojudge", DemoTask("calibration", self.seed)
        if not out.exists():
            if not data.exists():
                mine(
                    *self.pair,
                    task,
                    task.problems(MINED * len(self.texts)),
                    data,
                    MineSettings(96, places=self.places),
                )
            fit_autojudge(data, out, *self.pair, JudgeSettings(model="target"))
        return hla.Head.from_pretrained(out)

    def profile(self) -> hla.Profile:
        """Measure SV's profile, with the demo's companion over the drafter."""
        out, target, companion = self.work / "profile", self.models.target, self.models.companion
        if not out.exists():
            settings = ProfileSettings(gamma=(GAMMA,), batches=(1, 8), seed=self.seed)
            texts = [problem.prompt for problem in problems(max(len(self.texts), 64), self.seed, "calibration")]
            profile(target, self.drafter, companion, self.models.tokenizer, texts, out, settings)
        return hla.Profile.from_pretrained(out)


def pair_in(folder: Path) -> hla.demo.Demo:
    """Load the models of a folder that `examples/train_demo_models.py` wrote, with the demo's companion and tokenizer."""
    target, draft = (load_model(str(folder / name), dtype=torch.float32).eval() for name in ("target", "draft"))
    return hla.demo.load()._replace(target=target, draft=draft)


def recipes(
    models: hla.demo.Demo, draft: Any, fits: Fits | None, texts: list[PromptText]
) -> dict[str, Callable[[], Any]]:
    """Return a function per method that makes its policy. `fits` is None for the shipped heads and profile."""
    head = hla.demo.head if fits is None else fits.head
    judge = (lambda: hla.demo.head("autojudge")) if fits is None else fits.judge
    make_profile = hla.demo.profile if fits is None else fits.profile
    return {
        "strict": lambda: hla.LossyPolicy(stop=hla.Constant(GAMMA)),
        "svip": lambda: hla.as_policy("svip"),
        "specdec": lambda: hla.LossyPolicy(stop=hla.SpecDecPP(head("specdec"))),
        "sv": lambda: hla.SpeculativeVerification(make_profile(), models.companion, GAMMA, fallback=False),
        "sprinter": lambda: hla.Sprinter(head("sprinter")),
        "autojudge": lambda: hla.AutoJudge(judge(), window=WINDOW),
    }


def policies(name: str, made: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return each policy by the names of its draft and method, or print why it cannot be made."""
    found = {}
    for method, make in made.items():
        try:
            found[f"{name} {method}"] = make()
        except ValueError as error:
            print(f"{name} {method}: left out: {error}")
    return found


def show(found: list[ArmMetrics]) -> None:
    print(f"{'':26}{'accepted':>9}{'a call':>8}{'right':>9}{'lossy':>8}{'unseen':>8}{'tokens/s':>10}")
    for figures in found:
        accepted = "–" if figures.acceptance is None else f"{figures.acceptance:.1%}"
        call = "–" if figures.tokens_per_target_call is None else f"{figures.tokens_per_target_call:.2f}"
        shares = f"{figures.lossy:>8.1%}{figures.unchecked:>8.1%}"
        print(
            f"{figures.arm:26}{accepted:>9}{call:>8}{f'{figures.right}/{figures.judged}':>9}{shares}{figures.tokens_per_second.value:>10.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--problems", type=int, default=64, help="test problems that are written (default %(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--pair",
        type=Path,
        metavar="FOLDER",
        help="a folder of examples/train_demo_models.py, whose target and draft replace the demo's",
    )
    parser.add_argument("--work", type=Path, help="folder for what is fitted (default: a temporary one)")
    parser.add_argument("--small", action="store_true", help="fit on few prompts")
    args = parser.parse_args()
    warnings.filterwarnings(
        "ignore", message=".*(this policy is lossy|may differ|other sampling settings|another machine|held-out).*"
    )

    models = hla.demo.load() if args.pair is None else pair_in(args.pair)
    drafter = hla.demo.drafter() if args.pair is None else models.draft
    with tempfile.TemporaryDirectory() as folder:
        work = folder if args.work is None else args.work
        fits = Fits(models, drafter, Path(work), FEW if args.small else MANY, args.seed)
        by_draft: dict[str, tuple[Any, Fits | None]] = {"model": (models.draft, None), "eagle3": (drafter, fits)}
        if args.pair is not None:
            by_draft = {"model": (models.draft, fits)}
        arms: list[Arm] = []
        for name, (draft, fitted) in by_draft.items():
            chosen = policies(name, recipes(models, draft, fitted, fits.texts))
            made = make_arms(models.target, draft, chosen, tokenizer=models.tokenizer, assisted=False)
            arms += [arm for arm in made if arm.name != TARGET or not arms]
        task = load_task("demo", seed=args.seed)
        test_problems = task.problems(args.problems)
        prompts, writer = (
            [problem.prompt for problem in test_problems],
            TextWriter(models.target, models.tokenizer, DecodingSettings(max_new_tokens=96), task),
        )
        found = compare_arms(
            writer, arms, prompts, list_batches(len(prompts), [args.batch_size]), problems=test_problems
        )
        show(found.metrics)


if __name__ == "__main__":
    main()
