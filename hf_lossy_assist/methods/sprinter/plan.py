"""Does SPRINTER pay on these models and this machine, and at which threshold? A prediction, before any text is given away,
for one text at a time (in batches rounds are shorter: `HeadStop.patience`).

The verifier's verdicts on held-out texts are replayed into rounds, and a round's time is measured here. Theory
(`hf_lossy_assist.methods.sprinter.theory`, Zhong et al., huggingface.co/papers/2502.04557) stands beside it: it takes verdicts for independent coins,
and all tokens behind the first unacceptable one for unacceptable, which real texts are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import tqdm

from ...artifacts.heads import CONFIG, Head
from ...stops.heads import HeadStop
from ...training.dataset import KINDS, acceptable
from ...validation import LONGEST_DRAFT, MOST_FACTOR, MOST_NEW_TOKENS, check_int, check_number
from .figures import THRESHOLDS
from .replay import replay_all, run_lengths
from .theory import expected_accepted
from .times import measure


@dataclass
class Line:
    """One threshold's prediction."""

    threshold: float
    eta_tp: float
    eta_fp: float
    tokens_per_call: float  # the bonus or correction token included
    by_theorem: float  # the same by Theorem 3.3
    unchecked: float  # share of the new tokens
    distance: float  # mean d_TV of a token's distribution from the target's
    tokens_per_second: float
    of_strict: float
    of_svip: float
    of_target: float

    @property
    def gain(self) -> float:
        """Times the speed of the fastest that loses nothing: the target alone, strict acceptance or svip."""
        return min(self.of_strict, self.of_svip, self.of_target)


@dataclass
class Plan:
    """What `plan` found. Seconds are this machine's, on the prompts given."""

    t_draft: float  # seconds of one draft step
    t_target: float  # seconds of one target call
    t_verifier: float  # seconds of the head on one position
    per_text: float  # seconds of a call beside its rounds
    per_round: float  # seconds of a round beside its draft steps
    per_token: float  # seconds of a drafted token, everything included
    acceptable: float  # share of drafted tokens
    runs: dict[int, int]  # length of a run of acceptable tokens → how many
    target_per_second: float
    strict_per_second: float
    svip_per_second: float
    strict_per_call: float
    lines: list[Line]
    advice: str


def lambda_of(head: Head) -> float:
    """The λ that a head was trained for. `ValueError`, one line, where its config has none, or one that no fit takes."""
    place, lam = Path(head.source or "the head", CONFIG), head.config.lam
    if lam is None:
        raise ValueError(
            f"{place} has no λ (lam), by which a plan counts acceptable tokens: write the λ of its labels there, or fit the head again"
        )
    try:
        check_number("lam", lam, 0.0, MOST_FACTOR)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}: fit the head again") from None
    return lam


def plan(
    target: Any, draft: Any, tokenizer: Any, prompts: Sequence[str], head: Head, data: dict[str, torch.Tensor], *,
    kinds: Sequence[str] = KINDS, new_tokens: int = 96, max_draft: int = HeadStop.max_draft,
    thresholds: Sequence[float] = THRESHOLDS, do_sample: bool = False, max_distance: float = 0.02, repeats: int = 3,
) -> Plan:  # fmt: skip
    """Measure times on this machine and predict what each threshold gives.

    A call is modelled as `per_text + per_round · rounds + per_token · drafted`, fitted to runs of this engine with the head: drafts of
    1, half of and all of `max_draft` tokens, and a call of one token. Texts that SPRINTER writes lie between corrected ones and the draft's own: replays of the
    "mixed" and "draft" texts are mixed with weights 1 − η_FP and η_FP.

    Args:
        prompts: for the times alone; a few are enough.
        data: from `held_out` or `read_held_out`.
        max_distance: the mean d_TV per token that the advice stays within.
    """
    check_int("new_tokens", new_tokens, 2, MOST_NEW_TOKENS)
    check_int("max_draft", max_draft, 1, LONGEST_DRAFT)
    check_int("repeats", repeats, 1, 10**6)
    check_number("max_distance", max_distance, 0.0, 1.0)
    if not prompts or not thresholds:
        raise ValueError(f"plan needs prompts and thresholds, got {len(prompts)} and {len(thresholds)}")
    lam = lambda_of(head)
    times = measure(target, draft, tokenizer, prompts, head, new_tokens, max_draft, do_sample, repeats)
    fits = acceptable(data["p"], data["q"], lam)
    if bool(fits.all()) or not bool(fits.any()):
        only = "acceptable" if bool(fits.any()) else "not acceptable"
        raise ValueError(
            f"all {len(fits)} held-out tokens are {only} at λ = {lam:g}, so nothing is known of the head's other errors: "
            "fit it with more problems, or another λ"
        )
    mixed, drafts = kinds.index("mixed"), kinds.index("draft")
    runs = run_lengths(data, mixed, lam)
    lines = []
    for threshold in tqdm(thresholds, desc="replaying", unit="threshold"):
        says = data["v"] >= threshold
        eta_tp, eta_fp = (float(says[mask].float().mean()) for mask in (fits, ~fits))
        # Counts per token, so that the two replays can be mixed.
        parts = [(1 - eta_fp, replay_all(data, mixed, threshold, max_draft, new_tokens)),
                 (eta_fp, replay_all(data, drafts, threshold, max_draft, new_tokens))]  # fmt: skip
        calls, drafted, unchecked, distance = (
            sum(weight * getattr(part, name) / part.tokens for weight, part in parts)
            for name in ("calls", "drafted", "unchecked", "distance")
        )
        texts = sum(weight * part.texts / part.tokens for weight, part in parts)
        speed = 1 / (times["per_text"] * texts + times["per_round"] * calls + times["per_token"] * drafted)
        last = float((data["p"] / data["q"]).clamp(max=1.0)[~says].mean()) if bool((~says).any()) else 1.0
        in_a_round = [
            (expected_accepted(r, eta_tp, eta_fp, cap=max_draft - 1), count) for r, count in runs.items() if count
        ]
        lines.append(
            Line(
                threshold=threshold,
                eta_tp=eta_tp,
                eta_fp=eta_fp,
                tokens_per_call=1 / calls,
                by_theorem=1 + last + sum(e * c for e, c in in_a_round) / sum(c for _, c in in_a_round),
                unchecked=unchecked,
                distance=distance,
                tokens_per_second=speed,
                **{f"of_{name}": speed / times[f"{name}_per_second"] for name in ("strict", "svip", "target")},
            )
        )
    return Plan(
        **times, acceptable=float(fits.float().mean()), runs=runs, lines=lines, advice=_advice(lines, max_distance)
    )


def _advice(lines: Sequence[Line], max_distance: float) -> str:
    """What to do, in one line. A threshold is advised only where it beats everything that loses nothing."""
    fastest = max(lines, key=lambda line: line.gain)
    within = [line for line in lines if line.distance <= max_distance]
    limit = f"a mean distance of at most {max_distance:g} per token"
    if fastest.gain <= 1.0:
        return f"does not pay: {_beaten(fastest)} (τ = {fastest.threshold:g} is the fastest threshold)"
    if not within:
        return f"no threshold keeps {limit}; the fastest, τ = {fastest.threshold:g}, has {fastest.distance:.3f}"
    best = max(within, key=lambda line: line.gain)
    if best.gain <= 1.0:
        return (
            f"does not pay within {limit}: {_beaten(best)} (τ = {best.threshold:g} is the fastest threshold within it)"
        )
    return (
        f"τ = {best.threshold:g}: the fastest with {limit}: {best.of_target:.2f} × the target alone, {best.of_strict:.2f} × strict, "
        f"{best.of_svip:.2f} × svip, {best.tokens_per_call:.1f} tokens a target call, distance {best.distance:.4f}"
    )


def _beaten(line: Line) -> str:
    """By what, and what to do instead."""
    if line.gain == line.of_target:
        return f"{line.of_target:.2f} × the target alone; do not draft"
    name = "svip" if line.gain == line.of_svip else "strict"
    return f"{line.gain:.2f} × {name}, which loses nothing; use {name}, {line.of_target / line.gain:.2f} × the target alone"
