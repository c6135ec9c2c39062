"""Does SPRINTER pay on these models and this machine, and at which threshold? A prediction, before any text is given away,
for one text at a time (in batches rounds are shorter: `HeadStop.patience`).

The verifier's verdicts on held-out texts are replayed into rounds, and a round's time is measured here. Theory
(`hf_lossy_assist.methods.sprinter.theory`, Zhong et al., huggingface.co/papers/2502.04557) stands beside it: it takes verdicts for independent coins,
and all tokens behind the first unacceptable one for unacceptable, which real texts are not.
"""

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from scipy.optimize import nnls

from ...artifacts.heads import CONFIG, Head
from ...artifacts.hub import AGAIN, fetch
from ...artifacts.reading import read_object, read_whole
from ...generation.enable import speculative_generate
from ...models.inspect import base_of
from ...policy.policy import LossyPolicy
from ...stats.report import SpeculationStats
from ...stops.basic import Constant
from ...stops.heads import HeadStop
from ...training.dataset import KINDS, Table, acceptable, check_records
from ...validation import LONGEST_DRAFT, MOST_FACTOR, MOST_NEW_TOKENS, check_int, check_number
from .fit import THRESHOLDS
from .theory import expected_accepted


HELD_OUT = "heldout.safetensors"  # beside a fitted head: what `replay` needs, without features
DIGEST = "heldout_sha256"  # its entry in the head's config, under `training`
LARGEST = 2**28  # bytes of it
COLUMNS = {"row": torch.int32, "kind": torch.int8, **dict.fromkeys(("v", "p", "q", "distance"), torch.float32)}


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
    of_target: float


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
    strict_per_call: float
    lines: list[Line]
    advice: str


def held_out(table: Table, head: Head) -> dict[str, torch.Tensor]:
    """What is kept of (at most 64) test prompts: each record's row, kind, V, p, q and d_TV, in order."""
    table = table.of(torch.isin(table.prompt, table.prompt.unique()[:64]))
    with torch.no_grad():
        v = head(table.features)
    rows = torch.stack([table.prompt, table.kind]).unique(dim=1, return_inverse=True)[1]
    return {
        "row": rows.int(),
        "kind": table.kind.to(torch.int8),
        "v": v,
        "p": table.p.contiguous(),
        "q": table.q.contiguous(),
        "distance": table.distance.contiguous(),
    }


def read_held_out(source: str, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The held-out records beside a head, in a folder or on the Hub: the columns that `held_out` gives.

    Raises: `ValueError`, one line, where they are missing or not those that the head was fitted with (its config has their SHA-256).
    """
    file, config = fetch(source, [HELD_OUT, CONFIG], **kwargs)
    training = read_object(config).get("training")
    digest = training.get(DIGEST) if isinstance(training, dict) else None
    data = read_whole(file, LARGEST)
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(
            f"{file} is not the file that {CONFIG} was saved with (SHA-256 differs): fit the head again, or download it again ({AGAIN})"
        )
    try:
        columns = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}): fit the head again") from None
    found = {name: (column.dtype, column.shape) for name, column in columns.items()}
    shape = columns["row"].shape if "row" in columns else torch.Size()
    if found != {name: (dtype, shape) for name, dtype in COLUMNS.items()} or len(shape) != 1 or not shape[0]:
        raise ValueError(f"{file}: expected the columns {', '.join(COLUMNS)} of one length: fit the head again")
    check_records(columns, KINDS, f"{file}: ")
    if not ((columns["v"] >= 0) & (columns["v"] <= 1)).all():
        raise ValueError(f"{file}: v is not from 0 to 1 everywhere: fit the head again")
    for name in ("draft", "mixed"):
        if not (columns["kind"] == KINDS.index(name)).any():
            raise ValueError(f"{file} holds no texts of the kind {name!r}, which the plan replays: fit the head again")
    return columns


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


@dataclass
class Replay:
    """Rounds that a threshold would give on held-out texts."""

    tokens: int
    calls: int
    drafted: int
    unchecked: int
    distance: float  # sum of d_TV over the unchecked tokens
    texts: int = 1


def replay(
    v: np.ndarray, accept: np.ndarray, distance: np.ndarray, threshold: float, max_draft: int, new_tokens: int
) -> Replay:
    """One text of N positions through SPRINTER's rounds.

    v (N,): the verifier's word on the token proposed at each position; accept (N,) bool: whether the target's strict test would
    pass it; distance (N,): d_TV(p, q) there. V does not depend on the proposed token, so an unchecked token's distribution is q, and its
    distance from p exactly d_TV.
    """
    n = min(len(v), new_tokens)
    out = Replay(0, 0, 0, 0, 0.0)
    at = 0
    while at < n:
        room = min(max_draft, n - at - 1)  # one place is the target's own
        stop = next((i for i in range(room) if v[at + i] < threshold), room - 1)
        drafted = stop + 1 if room > 0 else 0
        seen = at + drafted - 1
        out.unchecked += max(drafted - 1, 0)
        out.distance += float(distance[at : at + max(drafted - 1, 0)].sum())
        out.drafted += drafted
        out.calls += 1
        at += drafted + (1 if drafted == 0 or accept[seen] else 0)
    out.tokens = n
    return out


def replay_all(
    data: dict[str, torch.Tensor], kind: int, threshold: float, max_draft: int, new_tokens: int, seed: int = 0
) -> Replay:
    """`replay` of every held-out text of one kind, added up. The strict test's coins are drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    coins = torch.rand(len(data["p"]), dtype=torch.float32, generator=generator)
    accept = (coins < data["p"] / data["q"]).numpy()
    v, distance, rows = data["v"].numpy(), data["distance"].numpy(), data["row"].numpy()
    total = Replay(0, 0, 0, 0, 0.0, texts=0)
    for row in np.unique(rows[data["kind"].numpy() == kind]):
        mine = rows == row
        one = replay(v[mine], accept[mine], distance[mine], threshold, max_draft, new_tokens)
        for name in vars(total):
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total


def run_lengths(data: dict[str, torch.Tensor], kind: int, lam: float) -> dict[int, int]:
    """How long acceptable tokens follow each other, from a text's start or behind an unacceptable one: length → count."""
    fits = acceptable(data["p"], data["q"], lam)
    counts: dict[int, int] = {}
    for row in data["row"][data["kind"] == kind].unique():
        run = 0
        for ok in fits[data["row"] == row].tolist():
            if ok:
                run += 1
            else:
                counts[run] = counts.get(run, 0) + 1
                run = 0
        counts[run] = counts.get(run, 0) + 1
    return dict(sorted(counts.items()))


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
    times = _measure(target, draft, tokenizer, prompts, head, new_tokens, max_draft, do_sample, repeats)
    fits = acceptable(data["p"], data["q"], lam)
    mixed, drafts = kinds.index("mixed"), kinds.index("draft")
    runs = run_lengths(data, mixed, lam)
    lines = []
    for threshold in thresholds:
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
                of_strict=speed / times["strict_per_second"],
                of_target=speed / times["target_per_second"],
            )
        )
    return Plan(
        **times, acceptable=float(fits.float().mean()), runs=runs, lines=lines, advice=_advice(lines, max_distance)
    )


def _advice(lines: Sequence[Line], max_distance: float) -> str:
    fastest = max(lines, key=lambda line: line.of_strict)
    within = [line for line in lines if line.distance <= max_distance]
    limit = f"a mean distance of at most {max_distance:g} per token"
    if fastest.of_strict <= 1.0:
        return "SPRINTER does not pay here: strict acceptance is faster at every threshold, and loses nothing"
    if not within:
        return f"no threshold keeps {limit}; the fastest, τ = {fastest.threshold:g}, has {fastest.distance:.3f}"
    best = max(within, key=lambda line: line.of_strict)
    if best.of_strict <= 1.0:
        return f"within {limit} strict acceptance is faster at every threshold"
    return (
        f"τ = {best.threshold:g}: the fastest with {limit}: {best.of_strict:.2f} × strict, "
        f"{best.tokens_per_call:.1f} tokens a target call, distance {best.distance:.4f}"
    )


def _measure(
    target: Any, draft: Any, tokenizer: Any, prompts: Sequence[str], head: Head, new_tokens: int, max_draft: int,
    do_sample: bool, repeats: int,
) -> dict[str, float]:  # fmt: skip
    """Seconds by runs of the engine, arms taking turns at each prompt; medians over the repeats."""
    base = base_of(target)
    lengths = sorted({1, max(max_draft // 2, 1), max_draft})
    arms: dict[str, LossyPolicy | None] = {"target": None, "strict": LossyPolicy(stop=Constant(5))}
    # A threshold of 0 never doubts, so rounds have a known length; strict acceptance costs what the last token's check costs.
    arms |= {str(n): LossyPolicy(stop=HeadStop(head, 0.0, n)) for n in lengths}
    arms["one token"] = arms["1"]
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    counts: dict[str, tuple[int, SpeculationStats | None]] = {}
    inputs = [tokenizer(prompt, return_tensors="pt").to(target.device) for prompt in prompts]
    settings = {"max_new_tokens": new_tokens, "do_sample": do_sample, "return_dict_in_generate": True}
    for repeat in range(repeats + 1):  # the first warms up
        spent = dict.fromkeys(arms, 0.0)
        tokens = dict.fromkeys(arms, 0)
        calls: dict[str, list[SpeculationStats]] = {name: [] for name in arms}
        for one in inputs:
            for name, policy in arms.items():
                given = {"input_ids": one["input_ids"], "attention_mask": one["attention_mask"], **settings}
                given |= {"max_new_tokens": 1} if name == "one token" else {}
                torch.manual_seed(repeat)
                _wait(target)
                began = time.perf_counter()
                if policy is None:
                    out = type(base).generate(base, **given)
                else:
                    out = speculative_generate(base, policy, assistant_model=draft, **given)
                _wait(target)
                spent[name] += time.perf_counter() - began
                tokens[name] += out.sequences.shape[1] - one["input_ids"].shape[1]
                calls[name] += [] if policy is None else [out.speculation]
        for name in arms:
            counts[name] = (tokens[name], SpeculationStats.merge(calls[name]) if calls[name] else None)
            if repeat:
                seconds[name].append(spent[name])

    took = {name: statistics.median(values) for name, values in seconds.items()}
    stats = {name: stat for name, (_, stat) in counts.items() if stat is not None}
    # Relative errors count, and no time is negative.
    fitted = [*map(str, lengths), "one token"]
    parts = [[len(stats[n].rows), stats[n].forwards["target"], stats[n].forwards.get("draft", 0)] for n in fitted]
    shares = np.array(parts, dtype=float) / np.array([took[n] for n in fitted])[:, None]
    (per_text, per_round, per_token), _ = nnls(shares, np.ones(len(fitted)))
    longest = stats[str(lengths[-1])]
    return {
        "t_draft": longest.seconds["draft"] / longest.forwards["draft"],
        "t_target": longest.seconds["target"] / longest.forwards["target"],
        "t_verifier": longest.seconds["head"] / longest.forwards["head"],
        "per_text": float(per_text),
        "per_round": float(per_round),
        "per_token": float(per_token),
        "target_per_second": counts["target"][0] / took["target"],
        "strict_per_second": counts["strict"][0] / took["strict"],
        "strict_per_call": counts["strict"][0] / stats["strict"].forwards["target"],
    }


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
