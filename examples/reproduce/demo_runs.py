"""Run the demo pair for a table: compare policies side by side, or measure the information in S and A.

Everything uses the package's own functions, those of `hf-lossy compare`, `profile`, `collect` and `fit`. A run's folder
is named by its settings, so tables with the same run share it, and an interrupted run continues.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from along_texts import AlongTexts, LongPair, long_run
from baselines import MovingAverage  # registers the other baselines' names, too
from flops import forward_flops
from information import measure_information
from regimes import Spec, make_model, make_models
from target_texts import TargetText, read_texts
from transformers import AutoConfig

import hf_lossy_assist as hla
from hf_lossy_assist.demo import Demo
from hf_lossy_assist.evaluation.arms import Arm, make_arms
from hf_lossy_assist.evaluation.comparison import (
    compare_arms,
    describe_comparison,
    finish_run,
    list_batches,
    open_run,
    read_run,
)
from hf_lossy_assist.evaluation.writer import ArmOutput, DecodingSettings, TextWriter
from hf_lossy_assist.methods.sprinter.collect import CollectSettings, collect
from hf_lossy_assist.methods.sprinter.fit import fit_sprinter
from hf_lossy_assist.methods.sv.collect_samples import ProfileSettings
from hf_lossy_assist.methods.sv.profiling import profile
from hf_lossy_assist.tasks.demo_task import GAINS, LOSSES, generate_problems
from hf_lossy_assist.tasks.load import DemoTask, Problem
from hf_lossy_assist.tasks.prompts import PromptText
from hf_lossy_assist.training.head_training import HeadFitSettings


VERBS = {"additions": GAINS, "subtractions": LOSSES}  # problems whose two steps both add, or both subtract
WITH_COMPANION = ("sv", "sv paper", "staged", "moving_average")  # policies built from a profile and models
MATH = "math"  # policies that accept any mismatch but one in a number or a sign: AutoJudge's Table 10
PROFILE_SEED = 900  # prompts that a profile is made of are not those that speed is measured on


@dataclass
class Measured:
    """The result of a run: answers and their problems, the information by pair of models and repeat, metrics of heads, texts, seconds along long ones, or FLOPs."""

    answers: list[ArmOutput] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    information: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)
    heads: dict[str, dict[str, Any]] = field(default_factory=dict)
    texts: list[TargetText] = field(default_factory=list)
    along: AlongTexts | None = None
    flops: dict[str, int] = field(default_factory=dict)


@dataclass
class Place:
    """The demo's models, the folder of all results, and a real model for long texts, if there is one."""

    demo: Demo
    out: Path
    long: LongPair | None = None
    made: dict[str, Demo] = field(default_factory=dict)

    def models(self, specs: dict[str, Spec]) -> Demo:
        """Return the models of a regime; the last one's are held, for tables that share a run follow one another."""
        key = json.dumps(specs, sort_keys=True)
        if key not in self.made:
            self.made = {key: make_models(specs, self.demo, self.out)}
        return self.made[key]

    def folder(self, kind: str, settings: dict[str, Any]) -> Path:
        """Return the folder for these settings."""
        text = json.dumps(settings, sort_keys=True, ensure_ascii=False)
        return self.out / kind / hashlib.sha256(text.encode()).hexdigest()[:16]


def measure(run: dict[str, Any], place: Place) -> Measured:
    """Do a run, finish it, or read its result."""
    kinds = {
        "compare": _compared,
        "information": _information,
        "heads": _heads,
        "texts": _texts,
        "long": _long,
        "flops": _flops,
    }
    return kinds[run["kind"]](run, place)


def load_problems(variant: str | None, split: str, seed: int, count: int) -> list[Problem]:
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
    problems = load_problems(run.get("variant"), "test", run["seed"], run["problems"])
    out = place.folder("runs", run)
    if not out.exists():
        _compare(run, place, problems, out)
    return Measured(read_run(out)[1], problems)


def _compare(run: dict[str, Any], place: Place, problems: list[Problem], out: Path) -> None:
    models = place.models(run.get("models", {}))
    decoding = DecodingSettings(max_new_tokens=run["max_new_tokens"], do_sample=run["do_sample"], seed=run["seed"])
    arms = _arms(run, models, make_policies(run, place, models), place)
    texts, sizes = [problem.prompt for problem in problems], run.get("batch_sizes", [1])
    source = f"demo, test problems of seed {run['seed']}"
    writer = TextWriter(models.target, models.tokenizer, decoding, DemoTask())
    facts = describe_comparison(writer, models.draft, arms, texts, source, sizes, problems)
    with open_run(out, facts, resume=out.with_name(out.name + ".partial").exists()) as folder:
        result = compare_arms(writer, arms, texts, list_batches(len(texts), sizes), folder, problems=problems)
        finish_run(folder, result.metrics)


def _arms(run: dict[str, Any], models: Demo, policies: dict[str, hla.LossyPolicy], place: Place) -> list[Arm]:
    """Return the target alone and each policy, with the run's draft or the one that `drafts` names for it."""
    drafts = run.get("drafts", {})
    groups: dict[str, dict[str, hla.LossyPolicy]] = {"": {}}
    for name, policy in policies.items():
        groups.setdefault(json.dumps(drafts[name]) if name in drafts else "", {})[name] = policy
    found = []
    for key, group in groups.items():
        draft = make_model(json.loads(key), models, place.out) if key else models.draft
        arms = make_arms(models.target, draft, group, tokenizer=models.tokenizer, assisted=False)
        found += arms if not key else arms[1:]  # the target alone once
    return found


def make_policies(run: dict[str, Any], place: Place, models: Demo) -> dict[str, hla.LossyPolicy]:
    """Return the run's policies by name, after making the heads and the profile that they need."""
    specs = run.get("models", {})
    heads = {name: str(head(settings, place, specs)) for name, settings in run.get("heads", {}).items()}
    made = measure_profile(run["profile"], place, specs) if "profile" in run else None
    return {
        name: _with_companion(spec, run["gamma"], made, models.companion)
        if made is not None and spec in WITH_COMPANION
        else _math_rule(spec, models)
        if spec.startswith(MATH)
        else hla.as_policy(spec.format(demo=hla.demo.FOLDER, **heads))
        for name, spec in run["policies"].items()
    }


def _math_rule(spec: str, models: Demo) -> hla.LossyPolicy:
    """Return the rule of "math" or "math+top_k:k=4", with AutoJudge's window: only strict acceptance lets numbers and signs pass."""
    vocabulary = models.tokenizer.get_vocab()
    never = tuple(sorted(i for token, i in vocabulary.items() if re.search(r"[0-9+=-]", token)))
    k = int(spec.partition("k=")[2] or len(vocabulary))
    return hla.LossyPolicy(hla.Limited(hla.TopK(k), never=never), hla.Constant(64))


def _with_companion(spec: str, gamma: int, made: hla.Profile, companion: Any) -> hla.LossyPolicy:
    # The default falls back to strict acceptance if the companion does not pay by the profile.
    if spec == "sv":
        return hla.sv(made, companion, gamma, fallback=False)
    if spec == "sv paper":
        return hla.sv(made, companion, gamma, exact="off", corrections=False, fallback=False)
    if spec == "staged":
        return hla.LossyPolicy(stop=hla.Constant(gamma), filter=hla.Staged(companion))
    return hla.LossyPolicy(stop=MovingAverage(made, max_draft=gamma))


def head(settings: dict[str, Any], place: Place, specs: dict[str, Spec]) -> Path:
    """Train a verifier on the task, or on a variant of it, as `hf-lossy collect` and `fit sprinter` do."""
    folder = place.folder("heads", settings | ({"models": specs} if specs else {}))
    data = folder.with_name(folder.name + "-data")
    if not data.exists():
        found = load_problems(settings.get("variant"), "calibration", settings["seed"], settings["problems"])
        texts = [PromptText(problem.prompt, problem.extra["reference"]) for problem in found]
        how = CollectSettings(new_tokens=settings["new_tokens"], lam=settings["lambda"], batch_size=16, do_sample=True)
        models, begun = place.models(specs), data.with_name(data.name + ".partial").exists()
        source = f"demo, {settings.get('variant') or 'all problems'}"
        collect(models.target, models.draft, models.tokenizer, texts, data, how, resume=begun, source=source)
    if not folder.exists():
        fit_sprinter(data, folder, (), HeadFitSettings(kind=settings.get("kind", "mlp")))
    return folder


def measure_profile(settings: dict[str, Any], place: Place, specs: dict[str, Spec]) -> hla.Profile:
    """Measure SV's profile of a regime's models on this machine; `settings`: those of `ProfileSettings`, and the number of problems."""
    folder = place.folder("profiles", settings | {"models": specs})
    if not folder.exists():
        texts, how, source = _profiled(settings)
        models, begun = place.models(specs), folder.with_name(folder.name + ".partial").exists()
        profile(
            models.target, models.draft, models.companion, models.tokenizer, texts, folder, how, resume=begun,
            source=source,
        )  # fmt: skip
    return hla.Profile.from_pretrained(folder)


def _profiled(settings: dict[str, Any]) -> tuple[list[str], ProfileSettings, str]:
    """Return the prompts of a profile, its settings, and where the prompts come from."""
    more = {name: value for name, value in settings.items() if name not in ("problems", "seed")}
    seed = settings.get("seed", PROFILE_SEED)
    texts = [problem.prompt for problem in load_problems(None, "calibration", seed, settings["problems"])]
    return texts, ProfileSettings(do_sample=True, **more), f"demo, calibration problems of seed {seed}"


def _information(run: dict[str, Any], place: Place) -> Measured:
    """Measure on other problems in each repeat how much S and A explain of a drafted token's acceptance."""
    shared = {name: run[name] for name in ("problems", "gamma", "new_tokens", "batch_size", "batches", "rounds")}
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for name, (draft, companion) in _pairs(run):
        repeats = [shared | {"seed": run["seed"] + repeat} for repeat in range(run["repeats"])]
        specs = {"draft": draft, "companion": companion}
        folders = [place.folder("information", repeat | {"models": specs}) for repeat in repeats]
        found[name] = [
            measure_information(place.models(specs), *_profiled(repeat)[:2], folder)
            for repeat, folder in zip(repeats, folders, strict=True)
        ]
    return Measured(information=found)


def _pairs(run: dict[str, Any]) -> Iterable[tuple[str, tuple[Spec, Spec]]]:
    """Yield the run's pairs of draft and companion by name: those that it lists, or every ordered pair of its `smaller` models."""
    yield from run.get("pairs", {}).items()
    smaller = run.get("smaller", {})
    yield from ((f"{a}, {b}", (smaller[a], smaller[b])) for a in smaller for b in smaller if a != b)


def _heads(run: dict[str, Any], place: Place) -> Measured:
    """Train verifiers, and read what they were found to be worth on prompts that were held out."""
    specs = run.get("models", {})
    made = {name: head(settings, place, specs) for name, settings in run["heads"].items()}
    return Measured(heads={name: hla.Head.from_pretrained(folder).config.metrics for name, folder in made.items()})


def _texts(run: dict[str, Any], place: Place) -> Measured:
    problems = load_problems(None, "test", run["seed"], run["problems"])
    return Measured(texts=read_texts(place.models(run.get("models", {})), problems, run["max_new_tokens"]))


def _long(run: dict[str, Any], place: Place) -> Measured:
    """Measure along long texts of a real model; nothing if none is named."""
    if place.long is None:
        return Measured()
    file = place.folder(
        "long",
        run | {"pair": [place.long.model, place.long.drafter, str(place.long.prompts)], "tokens": place.long.tokens},
    )
    return Measured(along=long_run(run, place.long, file.with_suffix(".jsonl")))


def _flops(run: dict[str, Any], place: Place) -> Measured:
    """Count the FLOPs of a forward of each config over `tokens` tokens."""
    configs = {name: AutoConfig.for_model(**config) for name, config in run["configs"].items()}
    return Measured(flops={name: forward_flops(made, run["tokens"], embedding=True) for name, made in configs.items()})
