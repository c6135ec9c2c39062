"""Simulate users on real answers of the demo pair, and count how often a certificate's bound is broken.

    python benchmarks/certificates.py --make        # 240 problems under every setting; writes certificates.json next to this file
    python benchmarks/certificates.py               # 2000 users at every limit; prints a table

The answers are a population with known rates of harm. A user draws problems from it with replacement, tries all settings on the first of
them, and certifies on the rest with the functions of `hf-lossy tune`. Limits are just below the true rates, where a bound is broken
most easily. Sequences of settings are tested in order, from lax to strict, and shuffled.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

from hf_lossy_assist.evaluation.tuning import (
    Candidate,
    TrialResult,
    certify,
    choose_candidates,
    find_fastest,
    parse_search_space,
)
from hf_lossy_assist.stats.intervals import harms_allowed


TABLE = Path(__file__).with_suffix(".json")
TARGET, SEED, NEW_TOKENS, BATCH = "target", 17, 96, 8
POLICIES = ["svip", *(f"top_k:k={k}+svip" for k in (2, 3, 4, 5)), "lenience+svip"]
DELTA, FIRST, REST, USERS = 0.05, 100, 700, 2000
ORDERS = ("as they are", "lax first", "shuffled")


@dataclass(frozen=True)
class Population:
    """The outcome of N problems under S settings, the lossless one first.

    harm, gain: (S, N) bool. tokens, seconds: (S, N) float. steps: the lossy settings, in the order of the rows after the first.
    """

    names: list[str]
    harm: np.ndarray
    gain: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    steps: list[Candidate]

    @property
    def rates(self) -> np.ndarray:
        """Return the true rate of harm of every setting, (S,)."""
        return self.harm.mean(axis=1)

    @property
    def speeds(self) -> np.ndarray:
        """Return the true tokens per second of every setting, (S,)."""
        return self.tokens.sum(axis=1) / self.seconds.sum(axis=1)


def read(file: Path = TABLE) -> Population:
    """Read the population from a table that `make` wrote."""
    table = json.loads(file.read_text(encoding="utf-8"))["settings"]
    field = parse_search_space(POLICIES)
    names = [*field.lossless, *(step.name for step in field.steps)]
    right = {name: np.array([mark == "1" for mark in entry["right"]]) for name, entry in table.items()}
    return Population(
        names,
        np.array([right[TARGET] & ~right[name] for name in names]),
        np.array([~right[TARGET] & right[name] for name in names]),
        np.array([table[name]["tokens"] for name in names], dtype=float),
        np.array([table[name]["ms"] for name in names]) / 1e3,
        field.steps,
    )


def make(problems: int, file: Path = TABLE) -> None:
    """Answer the problems under every setting, in turns, and write the table."""
    import torch

    from hf_lossy_assist import demo
    from hf_lossy_assist.artifacts.conditions import describe_machine
    from hf_lossy_assist.artifacts.identity import versions
    from hf_lossy_assist.evaluation.arms import make_arms
    from hf_lossy_assist.evaluation.comparison import compare_arms, list_batches
    from hf_lossy_assist.evaluation.writer import DecodingSettings, TextWriter
    from hf_lossy_assist.tasks.load import DemoTask

    models, task = demo.load(), DemoTask(seed=SEED)
    drawn = task.problems(problems)
    arms = make_arms(models.target, models.draft, parse_search_space(POLICIES).policies, assisted=False)
    writer = TextWriter(models.target, models.tokenizer, DecodingSettings(max_new_tokens=NEW_TOKENS), task)
    found = compare_arms(writer, arms, [p.prompt for p in drawn], list_batches(problems, [BATCH]), problems=drawn)
    table: dict[str, dict[str, Any]] = {}
    for arm in arms:
        answers = sorted((a for a in found.answers if a.arm == arm.name), key=lambda a: a.prompt)
        table[arm.name] = {
            "right": "".join("1" if a.right else "0" for a in answers),
            "tokens": [len(a.token_ids) for a in answers],
            "ms": [round(a.seconds * 1e3 / BATCH, 2) for a in answers],  # of its batch's seconds
        }
    made = {
        "problems": problems,
        "seed": SEED,
        "batch_size": BATCH,
        "machine": describe_machine(torch.device("cpu")),
        "versions": versions(),
    }
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in table.items())
    file.write_text(f'{{"made": {json.dumps(made)},\n"settings": {{\n{rows}\n}}}}\n', encoding="utf-8")


def ordered(steps: Sequence[Candidate], order: str) -> list[Candidate]:
    """Return the same steps, each sequence in this order."""
    random = np.random.default_rng(SEED)
    places = {ladder: [s.rank for s in steps if s.ladder == ladder] for ladder in {s.ladder for s in steps}}
    for ladder in sorted(places):
        ladder_places = places[ladder]
        places[ladder] = (
            ladder_places[::-1]
            if order == "lax first"
            else list(random.permutation(ladder_places))
            if order == "shuffled"
            else ladder_places
        )
    return [replace(step, rank=int(places[step.ladder][step.rank])) for step in steps]


def limits(population: Population) -> list[float]:
    """Return limits just below every true rate of harm, each exceeded by less than one answer, and one that no setting exceeds."""
    half = 0.5 / population.harm.shape[1]
    return [
        *sorted({float(rate) - half for rate in population.rates if rate > half}),
        float(population.rates.max()) + 0.08,
    ]


def drawn(
    population: Population, users: int, problems: int, random: np.random.Generator
) -> Iterator[list[TrialResult]]:
    """Return for each user the outcome of every setting on problems drawn with replacement."""
    n = population.harm.shape[1]
    times = random.multinomial(problems, np.full(n, 1 / n), size=users).T.astype(float)  # (N, users)
    harms, gains = (
        np.rint(values.astype(float) @ times).astype(int).T for values in (population.harm, population.gain)
    )
    speeds = ((population.tokens @ times) / (population.seconds @ times)).T
    for user in zip(speeds.tolist(), harms.tolist(), gains.tolist(), strict=True):
        yield [TrialResult(speed, harm, gain, problems) for speed, harm, gain in zip(*user, strict=True)]


@dataclass(frozen=True)
class Outcome:
    """The result of many users at one limit.

    Args:
        broken: share of users with any certified setting whose true harm is above the limit; chosen: with such a setting chosen.
        certified: share of users with a certificate. best: the fastest setting that these problems certify for nearly all, or None.
        near: share of users whose choice has at least 0.9 × its true speed.
    """

    limit: float
    order: str
    broken: float
    chosen: float
    certified: float
    best: str | None
    near: float | None


def outcome(population: Population, limit: float, order: str, users: int = USERS, seed: int = SEED) -> Outcome:
    """Return the result of the users at this limit."""
    random, steps = np.random.default_rng(seed), ordered(population.steps, order)
    rate, speed = (
        dict(zip(population.names, values.tolist(), strict=True)) for values in (population.rates, population.speeds)
    )
    lossless = population.names[0]
    oracle = known(population, steps, limit)
    broken = chosen = certified = near = 0
    trying, later = (drawn(population, users, problems, random) for problems in (FIRST, REST))
    for first, rest in zip(trying, later, strict=True):
        tried, found = (dict(zip(population.names, trials, strict=True)) for trials in (first, rest))
        verdicts = certify(choose_candidates(steps, tried, tried[lossless].speed, limit), found, limit, DELTA)
        best = find_fastest(verdicts)
        if best is not None and best.tried.speed <= found[lossless].speed:
            best = None
        broken += any(v.certified and rate[v.step.name] > limit for v in verdicts)
        certified += best is not None
        chosen += best is not None and rate[best.step.name] > limit
        near += oracle is not None and speed[lossless if best is None else best.step.name] >= 0.9 * speed[oracle]
    return Outcome(
        limit,
        order,
        broken / users,
        chosen / users,
        certified / users,
        oracle,
        None if oracle is None else near / users,
    )


def known(population: Population, steps: Sequence[Candidate], limit: float) -> str | None:
    """Return the fastest setting that these problems could certify with full knowledge of the rates.

    It and all earlier settings of its sequence pass together for 99 of 100 users, and it is faster than the lossless one.
    """
    rate, speed = (
        dict(zip(population.names, values.tolist(), strict=True)) for values in (population.rates, population.speeds)
    )
    allowed = harms_allowed(REST, limit, DELTA / len({step.ladder for step in steps}))
    fit = []
    for step in steps:
        below = [s.name for s in steps if s.ladder == step.ladder and s.rank <= step.rank]
        passes = all(allowed >= 0 and binom.cdf(allowed, REST, rate[name]) > 0.99 for name in below)
        if passes and speed[step.name] > speed[population.names[0]]:
            fit.append(step.name)
    return max(fit, key=lambda name: speed[name], default=None)


def main() -> None:
    """Make the table, or draw users from it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", action="store_true", help="answer the problems and write the table")
    parser.add_argument("--problems", type=int, default=240, help="problems of the table, a multiple of 8")
    parser.add_argument("--users", type=int, default=USERS, help="users at each limit")
    args = parser.parse_args()
    if args.make:
        make(args.problems)
        return
    population = read()
    for name, rate, speed in zip(population.names, population.rates, population.speeds, strict=True):
        print(f"{name:28} harm {rate:6.2%}   {speed:6.0f} tokens/s")
    most = DELTA + 3 * np.sqrt(DELTA * (1 - DELTA) / args.users)
    print(f"\n{args.users} users, {FIRST} + {REST} problems each; broken may be at most {most:.2%}")
    for order in ORDERS:
        for limit in limits(population):
            result = outcome(population, limit, order, args.users)
            near = "" if result.near is None else f"; within 10 % of {result.best}: {result.near:.1%}"
            print(
                f"{order:12} limit {limit:6.2%}: broken {result.broken:.2%}, chosen {result.chosen:.2%}, certified {result.certified:.1%}{near}"
            )


if __name__ == "__main__":
    main()
