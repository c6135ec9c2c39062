"""The arms of `policies.py`: every acceptance rule at three settings, with seconds and outputs."""

import argparse
import dataclasses
import time
from typing import Any

import torch

# Of examples/reproduce, whose folder `pairs` adds, which `policies` imports first.
from baselines import Mentored
from lossy_rules import MARS, Cascade, Ensemble, FLy, KLJudge, SyntheticForBenchmarks
from pairs import synchronize
from stateful_rules import CSD, RegretBudget

import hf_lossy_assist as hla
from hf_lossy_assist.stats.speculation import SpeculationStats


GREEDY, SAMPLING = "greedy", "sampling"
STRICT = "strict"


@dataclasses.dataclass
class Arm:
    """One policy, with its seconds and outputs on each batch."""

    rule: str
    setting: str
    mode: str
    policy: hla.LossyPolicy
    seconds: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    texts: list[list[int]] = dataclasses.field(default_factory=list)
    calls: list[SpeculationStats] = dataclasses.field(default_factory=list)

    def run(self, models: Any, inputs: Any, args: argparse.Namespace) -> None:
        settings = {"do_sample": False} if self.mode == GREEDY else {"do_sample": True, "temperature": 1.0, "top_k": 0}
        torch.manual_seed(args.seed + len(self.seconds))
        synchronize(args.device)
        began = time.perf_counter()
        out = models.target.generate(
            **inputs, assistant_model=models.draft, lossy_policy=self.policy, max_new_tokens=args.max_new_tokens,
            return_dict_in_generate=True, **settings,
        )  # fmt: skip
        synchronize(args.device)
        self.seconds.append(time.perf_counter() - began)
        new = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        self.texts += [row[: stats.num_new_tokens] for row, stats in zip(new, out.speculation.rows, strict=True)]
        self.tokens.append(out.speculation.num_new_tokens)
        self.calls.append(out.speculation)

    @property
    def speeds(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def rules(judge: hla.Head) -> dict[str, list[hla.AcceptanceRule]]:
    """Return three settings of every rule, from strict to loose; the first is its source's, if the source names one.

    The demo's target is more confident than real ones, so a source's setting is often strict acceptance.
    """
    table = judge.config.metrics["thresholds"]
    spread = [min(table, key=lambda row: abs(row["accepted"] - goal))["threshold"] for goal in (0.3, 0.6, 0.9)]
    return {
        "top_k": [hla.TopK(2), hla.TopK(4), hla.TopK(16)],
        "relaxed_top_k": [hla.RelaxedTopK(), hla.RelaxedTopK(10, 0.98), hla.RelaxedTopK(10, 0.998)],
        "top_k_tolerance": [hla.TopKTolerance(3, 3.0), hla.TopKTolerance(5, 4.0), hla.TopKTolerance(10, 6.0)],
        "typical": [hla.Typical(), hla.Typical(0.02, 0.1), hla.Typical(0.004, 0.1)],
        "lenience": [hla.Lenience(0.2), hla.Lenience(0.02), hla.Lenience(0.002)],
        "ensemble": [Ensemble(0.5), Ensemble(0.2), Ensemble(0.1)],
        "cascade": [Cascade(0.0), Cascade(0.5), Cascade(0.9)],
        "kl_judge": [KLJudge(0.2), KLJudge(2.0, 0.99), KLJudge(4.0, 0.999)],
        "fly": [FLy(), FLy(3, 0.1), FLy(1, 0.02)],
        "regret_budget": [RegretBudget(2.06), RegretBudget(8.0), RegretBudget(16.0)],
        "mars": [MARS(), MARS(0.7), MARS(0.4)],
        "csd": [CSD(0.2), CSD(0.02), CSD(0.002, 1)],
        "judge": [hla.Judge(judge, t) for t in spread],
        "limited": [hla.Limited(hla.TopK(4), per_request=n) for n in (1, 2, 4)],
        "union": [
            hla.Union((hla.Judge(judge, spread[0]), other)) for other in (hla.Typical(0.02, 0.1), hla.TopK(2), FLy(1, 0.1))
        ],
        "synthetic_for_benchmarks": [SyntheticForBenchmarks(rate) for rate in (0.5, 0.8, 0.95)],
        "block_verification": [hla.BlockVerification()],
        "mentored": [Mentored(0.01), Mentored(0.1), Mentored(0.2)],
        "entropy_verify": [hla.EntropyVerify(), hla.EntropyVerify(2.0, 0.1), hla.EntropyVerify(4.0, 0.01)],
        "thresholds": [hla.Thresholds(0.2), hla.Thresholds(0.02), hla.Thresholds(0.02, 0.1)],
    }  # fmt: skip


def arms_for(args: argparse.Namespace) -> list[Arm]:
    judge, verifier = hla.demo.head("autojudge"), hla.demo.head("sprinter")
    constant = hla.Constant(args.gamma)
    out = [Arm(STRICT, "", mode, hla.LossyPolicy(stop=constant)) for mode in (GREEDY, SAMPLING)]
    for name, settings in rules(judge).items():
        for rule in settings:
            # Without sampling, block verification is strict acceptance.
            mode = SAMPLING if name == "block_verification" or GREEDY not in rule.modes else GREEDY
            out.append(Arm(name, described(rule), mode, hla.LossyPolicy(rule=rule, stop=constant)))
    for threshold in (0.9, 0.7, 0.5):
        policy = hla.Sprinter(verifier, threshold=threshold, max_draft=args.gamma)
        out.append(Arm("all_but_last", f"Sprinter(τ = {threshold:g})", GREEDY, policy))
    return out


def described(rule: Any) -> str:
    """Return the class and its non-default parameters."""
    given = []
    for f in dataclasses.fields(rule):
        value = getattr(rule, f.name)
        if value == f.default or isinstance(value, hla.Head):
            continue
        parts = value if isinstance(value, tuple) else (value,)
        shown = [
            described(p) if isinstance(p, hla.AcceptanceRule) else f"{p:.3g}" if isinstance(p, float) else str(p)
            for p in parts
        ]
        plain = isinstance(value, hla.AcceptanceRule | tuple)
        given.append(", ".join(shown) if plain else f"{f.name}={shown[0]}")
    return f"{type(rule).__name__}({', '.join(given)})"
