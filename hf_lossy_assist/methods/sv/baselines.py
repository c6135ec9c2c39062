"""Measure SV's lossless baselines without a companion at each batch size: the target alone, strict acceptance and SVIP."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...artifacts.sv_profile import Profile
from ...drafters.hidden_state import DraftModel
from ...generation.runner import Runner
from ...policy.policy import LossyPolicy
from ...stats.clock import wait_for
from ...stops.confidence import SVIP
from ...stops.constant import Constant
from ...terminal import Bar
from .profiled_runner import ProfileSettings, run


BASELINES = "alternatives"  # the entry in a profile's metrics
NAMES = {"target": "the target alone", "strict": "strict", "svip": "svip"}
TURNS = 2  # timed turns, after one for warm-up


def measure_baselines(
    target: PreTrainedModel,
    draft: DraftModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    settings: ProfileSettings,
) -> list[dict[str, float]]:
    """Measure new tokens per second of all rows together: `rows`, `target`, `strict` and `svip` for each batch size.

    All arms continue the same prompts with the profile's sampling settings, one arm after the other in rotating order.
    """
    arms: dict[str, Runner | None] = {
        "target": None,
        "strict": Runner(LossyPolicy(stop=Constant(settings.gamma[-1])), draft),
        "svip": Runner(LossyPolicy(stop=SVIP()), draft),
    }
    found: list[dict[str, float]] = []
    with Bar(len(settings.batches) * (TURNS + 1) * len(arms), "timing baselines", "calls") as bar:
        for batch in settings.batches:
            tokens, seconds = dict.fromkeys(arms, 0), dict.fromkeys(arms, 0.0)
            for turn in range(TURNS + 1):
                chosen = [texts[(turn * batch + i) % len(texts)] for i in range(batch)]
                names = [*arms][turn % len(arms) :] + [*arms][: turn % len(arms)]
                for name in names:
                    wait_for(target.device)
                    began = time.perf_counter()
                    written = run(target, tokenizer, chosen, arms[name], settings)
                    wait_for(target.device)
                    if turn:
                        seconds[name] += time.perf_counter() - began
                        tokens[name] += written
                    bar.to(bar.done + 1)
            found.append({"rows": float(batch), **{name: tokens[name] / seconds[name] for name in arms}})
    return found


@dataclass(frozen=True)
class Comparison:
    """SV at one batch size: its predicted speed, and the ratio to each baseline's measured speed."""

    rows: int
    tokens_per_second: float
    ratios: dict[str, float]
    noise: float  # of the seconds behind the prediction

    @property
    def fastest(self) -> str:
        """The fastest baseline."""
        return min(self.ratios, key=lambda name: self.ratios[name])

    @property
    def gain(self) -> float:
        """The ratio to the fastest baseline's speed."""
        return self.ratios[self.fastest]

    @property
    def pays(self) -> bool:
        """Whether the gain exceeds the noise."""
        return self.gain - self.noise > 1


def compare_baselines(made: Profile) -> list[Comparison]:
    """Compare SV with the baselines at every batch size of a newly made profile."""
    found = []
    for speeds, pays, noise in zip(made.metrics[BASELINES], made.pays, made.latency.noise, strict=True):
        speed = float(pays) * speeds["strict"]  # predicted relative to strict acceptance, which was measured
        ratios = {name: speed / speeds[name] for name in NAMES}
        found.append(Comparison(int(speeds["rows"]), speed, ratios, float(noise)))
    return found


def advise(found: Sequence[Comparison]) -> str:
    """Return one line on where SV pays, or on what to use instead."""
    paying = [str(one.rows) for one in found if one.pays]
    if paying:
        return f"pays at {', '.join(paying)} rows"
    best = max(found, key=lambda one: one.gain - one.noise)
    more = f" beyond the noise of {best.noise:.0%}" if best.gain > 1 else ""
    times = f"{best.gain:.2f} × {NAMES[best.fastest]}, at best (rows: {best.rows})"
    if best.fastest == "target":
        return f"does not pay{more}: {times}; do not draft"
    other = f"{best.ratios['target'] / best.gain:.2f} × the target alone"
    return f"does not pay{more}: {times}; use {best.fastest}, {other}"
