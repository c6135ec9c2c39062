"""Run the demo pair for a table: compare policies side by side, or measure the information in S and A.

Everything uses the package's own functions, those of `hf-lossy compare`, `profile`, `collect` and `fit`. A run's folder
is named by its settings, so tables with the same run share it, and an interrupted run continues.
"""

import hashlib
import json
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import hf_lossy_assist as hla
from hf_lossy_assist.cli._runs import describe_run, show_progress
from hf_lossy_assist.evaluation.arms import make_arms
from hf_lossy_assist.evaluation.comparison import compare_arms, list_batches
from hf_lossy_assist.evaluation.report_page import read_run
from hf_lossy_assist.evaluation.results import ResultFolder
from hf_lossy_assist.evaluation.writer import ArmOutput, DecodingSettings, Writer
from hf_lossy_assist.methods.sprinter.collect import collect
from hf_lossy_assist.methods.sprinter.collect_runner import CollectSettings
from hf_lossy_assist.methods.sprinter.fit import fit_sprinter
from hf_lossy_assist.methods.sv.profiled_runner import ProfileSettings
from hf_lossy_assist.methods.sv.profiling import profile
from hf_lossy_assist.tasks.demo_task import GAINS, LOSSES, generate_problems
from hf_lossy_assist.tasks.load import DemoTask, Problem
from hf_lossy_assist.tasks.prompts import PromptText
from hf_lossy_assist.training.head_training import HeadFitSettings


VERBS = {"additions": GAINS, "subtractions": LOSSES}  # problems whose two steps both add, or both subtract
WITH_COMPANION = ("sv", "staged", "moving_average")  # policies built from a profile and models
PROFILE_SEED = 900  # prompts that a profile is made of are not those that speed is measured on


@dataclass
class Measured:
    """The result of a run: answers and their problems, or the information per pair of models and repeat."""

    answers: list[ArmOutput] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    information: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)


@dataclass
class Place:
    """The models, and the folder of all results."""

    models: Any
    out: Path

    def folder(self, kind: str, settings: dict[str, Any]) -> Path:
        """Return the folder for these settings."""
        text = json.dumps(settings, sort_keys=True, ensure_ascii=False)
        return self.out / kind / hashlib.sha256(text.encode()).hexdigest()[:16]


def measure(run: dict[str, Any], place: Place) -> Measured:
    """Do a run, finish it, or read its result."""
    return _compared(run, place) if run["kind"] == "compare" else _information(run, place)


def problems_of(variant: str | None, split: str, seed: int, count: int) -> list[Problem]:
    """Return the first demo problems of a stream, with their solutions; only those of a variant, if one is named."""
    if variant is None:
        return DemoTask(split, seed).problems(count)
    verbs = [f" {verb} " for verb in VERBS[variant]]
    matching = (
        problem for problem in generate_problems(split, seed) if sum(problem.prompt.count(verb) for verb in verbs) == 2
    )
    return [
        Problem(problem.prompt, str(problem.answer), {"reference": problem.solution})
        for problem in islice(matching, count)
    ]


def _compared(run: dict[str, Any], place: Place) -> Measured:
    problems = problems_of(run.get("variant"), "test", run["seed"], run["problems"])
    out = place.folder("runs", run)
    if not out.exists():
        _compare(run, place, problems, out)
    return Measured(read_run(out).answers, problems)


def _compare(run: dict[str, Any], place: Place, problems: list[Problem], out: Path) -> None:
    target, draft, _, tokenizer = place.models
    decoding = DecodingSettings(max_new_tokens=run["max_new_tokens"], do_sample=run["do_sample"], seed=run["seed"])
    policies = policies_of(run, place)
    arms = make_arms(target, draft, policies, tokenizer=tokenizer, assisted=False)
    texts, sizes = [problem.prompt for problem in problems], run.get("batch_sizes", [1])
    source = f"demo, test problems of seed {run['seed']}"
    facts = describe_run(target, draft, arms, decoding, texts, source, sizes, problems)
    store = ResultFolder(out, facts, resume=out.with_name(out.name + ".partial").exists())
    batches = list_batches(len(texts), sizes)
    with show_progress("comparing", len(arms) * (len(batches) + len(set(sizes)))) as tell:
        writer = Writer(target, tokenizer, decoding, DemoTask())
        found = compare_arms(writer, arms, texts, batches, store=store, problems=problems, tell=tell)
    store.finish(found.metrics)


def policies_of(run: dict[str, Any], place: Place) -> dict[str, hla.LossyPolicy]:
    """Return the run's policies by name, after making the heads and the profile that they need."""
    heads = {name: str(head(settings, place)) for name, settings in run.get("heads", {}).items()}
    made = profile_of(run["profile"], place) if "profile" in run else None
    return {
        name: _with_companion(spec, run["gamma"], made, place.models.companion)
        if made is not None and spec in WITH_COMPANION
        else hla.as_policy(spec.format(demo=hla.demo.FOLDER, **heads))
        for name, spec in run["policies"].items()
    }


def _with_companion(spec: str, gamma: int, made: hla.Profile, companion: Any) -> hla.LossyPolicy:
    if spec == "sv":
        # The paper's form. The default falls back to strict acceptance if the companion does not pay by the profile.
        return hla.sv(made, companion, gamma, fallback=False)
    if spec == "staged":
        return hla.LossyPolicy(stop=hla.Constant(gamma), filter=hla.Staged(companion))
    return hla.LossyPolicy(stop=hla.MovingAverage(made, max_draft=gamma))


def head(settings: dict[str, Any], place: Place) -> Path:
    """Train a verifier on a variant of the task, as `hf-lossy collect` and `fit sprinter` do."""
    folder = place.folder("heads", settings)
    data = folder.with_name(folder.name + "-data")
    if not data.exists():
        found = problems_of(settings["variant"], "calibration", settings["seed"], settings["problems"])
        texts = [PromptText(problem.prompt, problem.extra["reference"]) for problem in found]
        how = CollectSettings(new_tokens=settings["new_tokens"], lam=settings["lambda"], batch_size=16, do_sample=True)
        target, draft, _, tokenizer = place.models
        begun = data.with_name(data.name + ".partial").exists()
        collect(target, draft, tokenizer, texts, data, how, resume=begun, source=f"demo, {settings['variant']}")
    if not folder.exists():
        fit_sprinter(data, folder, (), HeadFitSettings(kind="mlp"))
    return folder


def profile_of(
    settings: dict[str, Any], place: Place, draft: str = "draft", companion: str = "companion"
) -> hla.Profile:
    """Measure SV's profile of the demo's models on this machine; `settings`: those of `ProfileSettings`, and the number of problems."""
    folder = place.folder("profiles", settings | {"draft": draft, "companion": companion})
    if not folder.exists():
        more = {name: value for name, value in settings.items() if name not in ("problems", "seed")}
        how = ProfileSettings(do_sample=True, **more)
        seed = settings.get("seed", PROFILE_SEED)
        texts = [problem.prompt for problem in problems_of(None, "calibration", seed, settings["problems"])]
        models, begun = place.models, folder.with_name(folder.name + ".partial").exists()
        profile(
            models.target, getattr(models, draft), getattr(models, companion), models.tokenizer, texts, folder, how,
            resume=begun, source=f"demo, calibration problems of seed {seed}",
        )  # fmt: skip
    return hla.Profile.from_pretrained(folder)


def _information(run: dict[str, Any], place: Place) -> Measured:
    """Measure profiles on other problems in each repeat: how much S and A explain of a drafted token's acceptance."""
    shared = {name: run[name] for name in ("problems", "gamma", "new_tokens", "batch_size", "batches", "rounds")}
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for name, (draft, companion) in run["pairs"].items():
        repeats = [shared | {"seed": run["seed"] + repeat} for repeat in range(run["repeats"])]
        found[name] = [profile_of(repeat, place, draft, companion).metrics["information"] for repeat in repeats]
    return Measured(information=found)
