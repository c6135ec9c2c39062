"""Compute SVIP's bounds, replay a draft stop over finished texts, and report both.

p = target, q = draft, H = entropy of q in nats, β = Σ min(p, q), the probability that a drafted token is accepted in sampling. Equations are those
of Zhang et al., "Draft Model Knows When to Stop" (huggingface.co/papers/2411.18462).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, TypedDict

import lazy_loader
import torch
from rich.table import Table

from ...policy.policy import LossyPolicy
from ...stops.confidence import SVIP
from ...terminal import console


scipy = lazy_loader.load("scipy")  # of the extra `train`, and slow to import
ENTROPY_FLOOR = 1e-6  # nats; below it γ = H_{q,p}/H_q would be a ratio of rounding errors
LOG_ZERO = -708.0  # substitute for log 0: exp(x) and exp(−x) are finite and above 0 in float64


def compute_bounds(p_logits: torch.Tensor, q_logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute bounds on acceptance at N positions from the target's and the draft's raw logits, both (N, V).

    Returns: tensors (N,), float64 except the last: "entropy" H_q, "cross_entropy" H_{q,p} and "kl" KL(q‖p), all in nats; "beta" (Eq. 1); "pinsker"
    1 − √(KL/2) (Eq. 3, 11; may be negative); "bretagnolle_huber" 1 − √(1 − e^−KL) (Eq. 12); "gamma" H_{q,p}/H_q (Eq. 5), NaN where H_q <
    `ENTROPY_FLOOR`; "match" (bool): both have the same argmax.
    """
    log_p, log_q = (x.double().log_softmax(dim=-1).clamp(min=LOG_ZERO) for x in (p_logits, q_logits))
    q, ratio = log_q.exp(), log_p - log_q
    entropy = -(q * log_q).sum(dim=-1)
    # Adding Σ q·(e^r − 1) = Σ p − Σ q = 0 makes all terms ≥ 0. Nothing cancels, so Pinsker's bound holds to the last digits even where p
    # and q nearly agree.
    kl = (q * (ratio.expm1() - ratio)).sum(dim=-1).clamp(min=0)
    return {
        "entropy": entropy,
        "cross_entropy": entropy + kl,
        "kl": kl,
        "beta": torch.minimum(log_p, log_q).exp().sum(dim=-1),
        "pinsker": 1 - (kl / 2).sqrt(),
        "bretagnolle_huber": 1 - (-torch.expm1(-kl)).sqrt(),
        "gamma": torch.where(entropy < ENTROPY_FLOOR, math.nan, 1 + kl / entropy),
        "match": p_logits.argmax(dim=-1) == q_logits.argmax(dim=-1),
    }


def choose_c(gamma: torch.Tensor, coverage: float) -> float:
    """Return the smallest c ≥ 0 with P(γ ≤ 2c + 1) ≥ `coverage` (Eq. 8) over `gamma` (N,), which contains no NaN."""
    rank = max(math.ceil(coverage * len(gamma) - 1e-9), 1)  # 0.07 · 100 is slightly above 7
    return max((float(gamma.kthvalue(rank).values) - 1) / 2, 0.0)


def fit_gamma(gamma: torch.Tensor) -> tuple[float, float] | None:
    """Fit shape α and rate β of γ − 1 ~ Gamma(α, β), by maximum likelihood over `gamma` (N,) (Eq. 9).

    γ = 1 has no density and is left out. Returns None if fewer than two different values remain, to which no Gamma distribution fits.
    """
    excess = (gamma - 1)[gamma > 1]
    if len(excess) < 2 or float(excess.std()) <= 1e-9 * float(excess.mean()):
        return None
    shape, _, scale = scipy.stats.gamma.fit(excess.cpu().numpy(), floc=0)
    return float(shape), float(1 / scale)


class Reliability(TypedDict):
    """P(γ ≤ 2c + 1) as counted, by Gamma (Eq. 9, 15; None without a fit) and Gaussian (Eq. 14), and the bound 1 − √(c·H) (Eq. 6).

    "holds": the share of positions with β not below the bound; "mean": the bound's mean, with values below 0 as 0.
    """

    c: float
    empirical: float
    gamma: float | None
    gaussian: float
    holds: float
    mean: float


class GridRow(TypedDict):
    """Result of a replayed stop; draft length and tokens per call are means per target call, the acceptance rate is accepted ÷ drafted."""

    h: float | None  # None: constant length
    longest: int
    draft_length: float
    acceptance_rate: float
    tokens_per_call: float
    speed: float  # 1: the target alone


def measure_reliability(c: float, found: Mapping[str, torch.Tensor], fit: tuple[float, float] | None) -> Reliability:
    """Measure how safe `c` is, from the results of `compute_bounds` and `fit_gamma`."""
    gamma, bound = found["gamma"][~found["gamma"].isnan()], 1 - (c * found["entropy"]).sqrt()
    mean, spread, limit = float(gamma.mean()), float(gamma.std(correction=0)), 2 * c + 1
    return {
        "c": c,
        "empirical": float((gamma <= limit).double().mean()),
        "gamma": float(scipy.stats.gamma.cdf(2 * c, fit[0], scale=1 / fit[1])) if fit else None,
        "gaussian": NormalDist(mean, spread).cdf(limit) if spread else float(mean <= limit),
        "holds": compute_share(found["beta"], bound),
        "mean": float(bound.clamp(min=0).mean()),
    }


def compute_share(beta: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the share of positions at which `bound` (N,) is a lower bound of `beta` (N,), up to rounding."""
    return float((beta + 1e-9 >= bound).double().mean())


def replay(stops: torch.Tensor, accept: torch.Tensor, valid: torch.Tensor, longest: int) -> tuple[float, float, float]:
    """Return the expected target calls, drafted and accepted tokens for decoding N texts in rounds of at most `longest` tokens.

    Args: `stops` (N, T) bool, whether the draft stops after token t; `accept` (N, T) float64, the probability that token t of the text came from
    the draft if it was drafted; `valid` (N, T) bool, whether there is a token (a prefix of each row).

    Calls and accepted tokens are exact. A rejected draft is assumed to continue along the text, since its continuation is unknown.
    """
    rows, width = accept.shape
    ends = stops | ~torch.cat([valid[:, 1:], torch.zeros_like(valid[:, :1])], dim=1)
    length, ahead = torch.zeros_like(accept), accept.new_zeros(rows)
    for t in reversed(range(width)):
        ahead = torch.where(ends[:, t], 1.0, ahead + 1)
        length[:, t] = ahead.clamp(max=longest)  # of a round that starts at t

    drafting = accept.new_zeros(rows, longest)  # [n]: probability of a round in which n tokens were accepted so far
    drafting[:, 0] = 1
    bonus = accept.new_zeros(rows)  # … in which all were: the next token is the target's
    full = torch.arange(1, longest + 1, device=accept.device) == longest
    calls = drafted = accepted = accept.new_zeros(())
    for t in range(width):
        begun, passed = drafting[:, 0] * valid[:, t], drafting * accept[:, t, None]
        calls, drafted = calls + begun.sum(), drafted + (begun * length[:, t]).sum()
        accepted = accepted + (passed.sum(dim=1) * valid[:, t]).sum()
        fresh, over = (drafting - passed).sum(dim=1) + bonus, stops[:, t, None] | full
        bonus = (passed * over).sum(dim=1)
        drafting = torch.cat([fresh[:, None], (passed * ~over)[:, :-1]], dim=1)
    return float(calls), float(drafted), float(accepted)


@dataclass(frozen=True)
class SVIPCalibration:
    """The result of `calibrate_svip`. Entropies are in nats, means and shares are over all `positions`."""

    stop: SVIP  # ready for `lossy_policy=`
    texts: int
    positions: int
    left_out: int  # positions with H < ENTROPY_FLOOR, which have no γ
    no_excess: int  # positions with γ = 1, left out of the Gamma fit only
    means: dict[str, float]  # of the results of `compute_bounds`; bounds below 0 count as 0
    holds: dict[str, float]  # "pinsker" and "bretagnolle_huber": shares of positions where β is not below the bound
    pinsker_gain: float  # mean Pinsker bound ÷ mean Bretagnolle–Huber bound − 1; about 0.11 in the paper
    gamma_std: float
    gamma_fit: tuple[float, float] | None  # shape α and rate β of γ − 1
    coverage: float
    c: float  # the smallest that reaches the coverage
    reliability: tuple[Reliability, ...]  # for `c` and for the stop's c
    cost_ratio: float  # seconds of a draft step ÷ seconds of a target step
    grid: tuple[GridRow, ...]
    best: GridRow
    constant: GridRow  # the fastest constant length, for comparison

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form; `LossyPolicy.from_dict({"stop": result["stop"]})` restores the stop."""
        return asdict(self) | LossyPolicy(stop=self.stop).to_dict()

    def table(self) -> Table:
        """Return a `rich.table.Table` of all results."""
        table = Table("SVIP calibration", "", show_edge=False)
        table.columns[1].justify = "right"
        for line in _make_lines(self):
            table.add_row(*line)
        return table

    def __str__(self) -> str:
        screen = console(width=120, color_system=None)
        with screen.capture() as capture:
            screen.print(self.table())
        return capture.get()


def _make_lines(it: SVIPCalibration) -> list[tuple[str, str]]:
    m, fit = it.means, "none" if it.gamma_fit is None else "{:.3f}, {:.3f}".format(*it.gamma_fit)
    lines = [
        ("texts, positions", f"{it.texts}, {it.positions}"),
        (f"of these H < {ENTROPY_FLOOR:g} (no γ), γ = 1", f"{it.left_out}, {it.no_excess}"),
        ("H(q), H(q, p), KL(q‖p) in nats", f"{m['entropy']:.3f}, {m['cross_entropy']:.3f}, {m['kl']:.3f}"),
        ("β, same argmax", f"{m['beta']:.3f}, {m['match']:.1%}"),
        ("Pinsker bound, holds", f"{m['pinsker']:.3f}, {it.holds['pinsker']:.1%}"),
        ("Bretagnolle–Huber bound, holds", f"{m['bretagnolle_huber']:.3f}, {it.holds['bretagnolle_huber']:.1%}"),
        ("Pinsker ÷ Bretagnolle–Huber − 1", f"{it.pinsker_gain:+.1%}"),
        ("γ: mean, spread", f"{m['gamma']:.3f}, {it.gamma_std:.3f}"),
        ("γ − 1 as Gamma: shape, rate", fit),
        (f"smallest c that covers {it.coverage:.0%}", f"{it.c:.4g}"),
    ]
    for safety in it.reliability:
        modelled = "–" if safety["gamma"] is None else f"{safety['gamma']:.1%}"
        name, shares = f"c = {safety['c']:.4g}", f"{safety['empirical']:.1%}, {modelled}, {safety['gaussian']:.1%}"
        lines.append((f"{name}: P(γ ≤ 2c + 1) counted, Gamma, Gaussian", shares))
        lines.append((f"{name}: bound 1 − √(c·H), holds", f"{safety['mean']:.3f}, {safety['holds']:.1%}"))
    lines.append(("draft step ÷ target step", f"{it.cost_ratio:.3f}"))
    for row in (*it.grid, it.constant):
        name = f"constant {row['longest']}" if row["h"] is None else f"h = {row['h']:g}"
        figures = f"{row['draft_length']:.2f} drafted, {row['acceptance_rate']:.1%} accepted"
        best = " ← best h" if row is it.best else ""
        lines.append((name + best, f"{figures}, {row['tokens_per_call']:.2f} a call, speed {row['speed']:.2f}"))
    return [*lines, ("stop", str(it.stop))]


def describe_bounds(found: dict[str, torch.Tensor], gamma: torch.Tensor, coverage: float, c: float) -> dict[str, Any]:
    """Return the fields of `SVIPCalibration` about the bounds; `gamma`: the values in `found` that are not NaN."""
    fit, fitted = fit_gamma(gamma), choose_c(gamma, coverage)
    means = {name: float(x.double().clamp(min=0).nanmean()) for name, x in found.items()}
    return {
        "positions": len(found["kl"]),
        "left_out": len(found["kl"]) - len(gamma),
        "no_excess": int((gamma == 1).sum()),
        "means": means,
        "holds": {name: compute_share(found["beta"], found[name]) for name in ("pinsker", "bretagnolle_huber")},
        "pinsker_gain": means["pinsker"] / max(means["bretagnolle_huber"], 1e-300) - 1,
        "gamma_std": float(gamma.std(correction=0)),
        "gamma_fit": fit,
        "coverage": coverage,
        "c": fitted,
        "reliability": tuple(measure_reliability(value, found, fit) for value in dict.fromkeys((fitted, c))),
    }
