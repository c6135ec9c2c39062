"""Which settings a certificate is asked for, and which of them get one.

Settings of one rule are a ladder from strict to lax. On some problems all of them are tried; those that are faster than the best lossless
policy and have not shown too much harm stand for the certificate. On OTHER problems each ladder is climbed from its strictest candidate:
a setting is certified where the bound on its harm is low enough, and the first that is not ends the climb. A ladder has its share of δ, and
no step costs more (fixed-sequence testing: Maurer, Hothorn and Lehmacher 1995; Angelopoulos et al., "Learn then Test", 2021): whatever the
order of the true losses is, one that is certified and too high comes up with probability δ at most.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..stats.intervals import gain_bound, harm_bound, net_bound


DOUBT = 0.1  # a setting is not a candidate where its harm on the first problems is above the limit at this level


@dataclass(frozen=True)
class Step:
    """One setting: `ladder` is its rule's name, `place` counts from the strictest."""

    name: str
    ladder: str
    place: int


@dataclass(frozen=True)
class Tried:
    """What came of a setting on some problems; `speed` in tokens per second."""

    speed: float
    harms: int
    gains: int
    problems: int


@dataclass(frozen=True)
class Verdict:
    """A setting's bounds on the certificate's problems, each by itself at its ladder's share of δ; `certified`: its harm is at most the limit.

    The limit, and not the setting's own bound, is what holds with all of them together: which is chosen depends on the same problems.
    """

    step: Step
    tried: Tried
    harm: float
    net: float
    certified: bool


def candidates(steps: Sequence[Step], tried: Mapping[str, Tried], lossless: float, max_loss: float) -> list[Step]:
    """The steps worth a certificate: faster than the best lossless policy (`lossless`, tokens per second), not known to harm too much.

    Nor is one whose ladder has a faster step that harmed no more: it could only end the climb early.
    """
    ordered = sorted(steps, key=lambda s: (s.ladder, s.place))
    fit = [s for s in ordered if tried[s.name].speed > lossless and _least_harm(tried[s.name]) <= max_loss]
    return [s for s in fit if not any(o.ladder == s.ladder and _outdoes(tried[o.name], tried[s.name]) for o in fit)]


def _outdoes(one: Tried, other: Tried) -> bool:
    return one.speed > other.speed and one.harms <= other.harms


def _least_harm(its: Tried) -> float:
    return gain_bound(its.harms, its.problems, DOUBT)


def verdicts(steps: Sequence[Step], tried: Mapping[str, Tried], max_loss: float, delta: float) -> list[Verdict]:
    """Climb every ladder; `tried`: on problems that had no part in choosing `steps`."""
    ladders: defaultdict[str, list[Step]] = defaultdict(list)
    for step in sorted(steps, key=lambda s: s.place):
        ladders[step.ladder].append(step)
    found = []
    for ladder in ladders.values():
        share, climbing = delta / len(ladders), True
        for step in ladder:
            its = tried[step.name]
            harm = harm_bound(its.harms, its.problems, share)
            climbing = climbing and harm <= max_loss
            found.append(Verdict(step, its, harm, net_bound(its.harms, its.gains, its.problems, share), climbing))
    return found


def fastest(found: Sequence[Verdict]) -> Verdict | None:
    """The fastest of those certified, or None."""
    return max((its for its in found if its.certified), key=lambda its: its.tried.speed, default=None)
