"""What SV has to beat at each batch size: the target alone, strict acceptance and SVIP, which lose nothing and need no companion."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...artifacts.sv_profile import Profile
from ...generation.runner import Runner
from ...policy.policy import LossyPolicy
from ...stats.clock import wait_for
from ...stops.confidence import SVIP
from ...stops.constant import Constant
from ...terminal import Bar
from .instrument import ProfileSettings, run


ALTERNATIVES = "alternatives"  # the entry of a profile's metrics
NAMES = {"target": "the target alone", "strict": "strict", "svip": "svip"}
TURNS = 2  # that are timed, behind one that warms up


def measure(
    target: Any, draft: Any, tokenizer: Any, texts: Sequence[str], settings: ProfileSettings
) -> list[dict[str, float]]:
    """New tokens per second of all rows together: `rows`, `target`, `strict` and `svip` for each batch size.

    All continue the same prompts with the profile's sampling settings, one behind the other, in an order that rotates.
    """
    arms: dict[str, Runner | None] = {
        "target": None,
        "strict": Runner(LossyPolicy(stop=Constant(settings.gamma[-1])), draft),
        "svip": Runner(LossyPolicy(stop=SVIP()), draft),
    }
    found: list[dict[str, float]] = []
    with Bar(len(settings.batches) * (TURNS + 1) * len(arms), "timing alternatives", "calls") as bar:
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
            speeds = {name: tokens[name] / seconds[name] for name in arms}
            found.append({"rows": float(batch), **speeds})
    return found


@dataclass(frozen=True)
class Compared:
    """SV at one batch size: its speed as predicted, and how many times that of each alternative as measured it is."""

    rows: int
    tokens_per_second: float
    of: dict[str, float]
    noise: float  # of the seconds that the prediction is made of

    @property
    def fastest(self) -> str:
        """The alternative that is hardest to beat."""
        return min(self.of, key=lambda name: self.of[name])

    @property
    def gain(self) -> float:
        """Times the speed of that one."""
        return self.of[self.fastest]

    @property
    def pays(self) -> bool:
        """By more than the noise."""
        return self.gain - self.noise > 1


def compared(made: Profile) -> list[Compared]:
    """SV beside the alternatives at every batch size of a profile that has just been made."""
    found = []
    for speeds, pays, noise in zip(made.metrics[ALTERNATIVES], made.pays, made.latency.noise, strict=True):
        speed = float(pays) * speeds["strict"]  # predicted against strict acceptance, which was measured
        of = {name: speed / speeds[name] for name in ("target", "strict", "svip")}
        found.append(Compared(int(speeds["rows"]), speed, of, float(noise)))
    return found


def advice(found: Sequence[Compared]) -> str:
    """Where SV pays, or what to do instead, in one line."""
    paying = [str(its.rows) for its in found if its.pays]
    if paying:
        return f"pays at {', '.join(paying)} rows"
    best = max(found, key=lambda its: its.gain - its.noise)
    more = f" beyond the noise of {best.noise:.0%}" if best.gain > 1 else ""
    times = f"{best.gain:.2f} × {NAMES[best.fastest]}, at best (rows: {best.rows})"
    if best.fastest == "target":
        return f"does not pay{more}: {times}; do not draft"
    other = f"{best.of['target'] / best.gain:.2f} × the target alone"
    return f"does not pay{more}: {times}; use {best.fastest}, {other}"
