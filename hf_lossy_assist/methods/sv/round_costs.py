"""Measure the cost of a round on this machine: seconds of real rounds by number of rows and of verified tokens."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lazy_loader
import numpy as np
import torch
from transformers import PreTrainedModel

from ...artifacts.identity import ModelIdentity
from ...artifacts.profile_tables import Bins, Latency
from ...artifacts.sv_profile import Profile
from ...engine.call import Call
from ...filters.base import VerifyFilter
from ...filters.sv import SVFilter, choose
from ...policy.policy import LossyPolicy
from ...round import Draft, Selection, Verified
from ...rules.acceptance import RandomSource
from ...stops.constant import Constant
from ...terminal import Bar
from .collect_samples import Profiled


scipy = lazy_loader.load("scipy")  # of the extra `train`, and slow to import
LEVELS = 6  # numbers of verified tokens that are timed, from none to all


@dataclass(frozen=True, eq=False)
class RandomFilter(VerifyFilter):
    """A filter for timing: it runs `timed`, then verifies `next(tokens)` of the drafted tokens, in random rows."""

    timed: SVFilter
    observed: bool
    random: np.random.Generator
    tokens: Iterator[int]

    def companion_for(self, target: PreTrainedModel) -> PreTrainedModel:
        return self.timed.companion

    def reads_companion(self, rows: int) -> bool:
        return self.observed

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        timed = self.timed.select(draft, companion, randomness)
        batch, gamma = draft.tokens.shape
        order = choose(self.random.random((batch, gamma)), np.ones(batch * gamma + 1), 0.0).order
        counts = np.bincount(order[: next(self.tokens)] // max(gamma, 1), minlength=batch)
        sent = torch.minimum(torch.from_numpy(counts).to(draft.lengths.device), draft.lengths)
        # Acceptance evaluates it on the whole vocabulary after a rejection or a drop: a large part of the filter's work.
        return Selection(draft, sent, companion=companion, would_verify=timed.would_verify)


def rotate(levels: Sequence[int], random: np.random.Generator) -> Iterator[int]:
    """Yield each level equally often, in a new order each time, endlessly."""
    while True:
        yield from (levels[i] for i in random.permutation(len(levels)))


class Stopwatch:
    """Seconds of whole rounds: (tokens verified, with companion) → [(the round without drafting, drafting)]."""

    def __init__(self, batch: int, gamma: int, levels: Sequence[int]):
        self.shape, self.levels = (batch, gamma), levels
        self.seconds: defaultdict[tuple[int, bool], list[tuple[float, float]]] = defaultdict(list)
        self.last: tuple[float, float] | None = None  # end of the previous round, and drafting until then

    def __call__(self, call: Call, verified: Verified) -> None:
        now, drafting = time.perf_counter(), call.clock.seconds().get("draft", 0.0)
        # Rows that have ended, or will soon, draft less, so the round has fewer rows than it is timed for.
        whole = verified.tokens.shape == self.shape and bool((verified.drafted == self.shape[1]).all())
        if self.last is not None and whole:
            spent = drafting - self.last[1]
            observed = verified.selection.companion is not None
            self.seconds[int(verified.sent.sum()), observed].append((now - self.last[0] - spent, spent))
        self.last = time.perf_counter(), drafting

    def count(self) -> int:
        return sum(map(len, self.seconds.values()))

    def fewest(self) -> int:
        """Return the number of rounds of the rarest kind."""
        return min(len(self.seconds[m, observed]) for m in self.levels for observed in (False, True))

    def summarise(self) -> dict[str, Any]:
        """Return this batch size's entries of `Latency`."""
        plain, also = ([np.array(self.seconds[m, seen])[:, 0] for m in self.levels] for seen in (False, True))
        medians = [float(np.median(values)) for values in plain]
        spread = [np.subtract(*np.percentile(x, (75, 25))) / 2 / m for x, m in zip(plain, medians, strict=True)]
        slower = np.median([np.median(x) - m for x, m in zip(also, medians, strict=True)])
        drafting = np.median([spent for pairs in self.seconds.values() for _, spent in pairs])
        return {
            "tokens": self.levels,
            "seconds": fit_convex(self.levels, medians),
            "step": drafting / self.shape[1],
            "companion": max(slower, 0.0),
            "noise": np.median(spread),
        }


def fit_convex(tokens: Sequence[int], seconds: Sequence[float]) -> np.ndarray:
    """Return the least-squares fit to `seconds` that is non-decreasing and convex in `tokens` (M,), (M,) float64.

    The schedule that stops at the first decrease of goodput is optimal only for convex seconds (Assumption D.10).
    """
    x = np.array(tokens) / tokens[-1]
    hinges = np.maximum(x[:, None] - x[:-1], 0.0)  # (M, M − 1)   change of slope at each level, never negative
    basis = np.concatenate([np.ones((len(x), 1)), hinges], axis=1)
    return basis @ scipy.optimize.nnls(basis, np.array(seconds))[0]


def measure_latency(profiled: Profiled, bins: Bins) -> Latency:
    """Measure seconds of rounds at each batch size, on prompts of the profile: the convex fit of the medians at each level.

    A round with the companion includes the filter's work with the cells of `bins`, exact correction included. The companion reads along in every
    round of a call or in none, since it would otherwise have to catch up.
    """
    settings, texts = profiled.settings, profiled.texts
    gamma, random = settings.gamma[-1], np.random.default_rng(settings.seed)
    timed = SVFilter(_make_unmeasured(profiled, bins), profiled.companion, fallback=False)
    columns: defaultdict[str, list] = defaultdict(list)
    count = min(LEVELS, settings.batches[0] * gamma + 1)  # the same for all batch sizes
    with Bar(len(settings.batches), "timing rounds", "batch sizes") as bar:
        for done, batch in enumerate(settings.batches):
            levels = np.linspace(0, batch * gamma, count).round().astype(np.int64).tolist()
            watch, first = Stopwatch(batch, gamma, levels), 0
            both = [RandomFilter(timed, observed, random, rotate(levels, random)) for observed in (False, True)]
            while watch.fewest() < settings.rounds:
                chosen = [texts[(first + i) % len(texts)] for i in range(batch)]
                before, first = watch.count(), first + batch
                for model in both:
                    watch.last = None  # a call's first round includes its prompt
                    profiled.run(chosen, LossyPolicy(stop=Constant(gamma), filter=model), watch, ends=False)
                assert watch.count() > before, "a call has a second round of γ tokens a row"
                bar.to(done + min(watch.fewest() / settings.rounds, 1.0))
            for name, value in watch.summarise().items():
                columns[name].append(value)
    return Latency(np.array(settings.batches), **{name: np.array(values) for name, values in columns.items()})


def _make_unmeasured(profiled: Profiled, bins: Bins) -> Profile:
    """Return a profile with these cells but no measured seconds: each round counts as one second."""
    gamma = profiled.settings.gamma[-1]
    flat = Latency(np.array([1]), np.array([[0, gamma]]), np.ones((1, 2)), *np.zeros((3, 1)))
    target, draft, companion = map(ModelIdentity.of, profiled[:3])
    return Profile(bins, flat, gamma, np.ones(1), target, draft, companion, "", {}, "")
