"""Fit SVIP to a pair of models: how good its bound is on their texts, and which threshold should be fastest.

p = target, q = draft, H = entropy of q in nats, β = Σ min(p, q), the chance that a drafted token is accepted under sampling.
Equations are those of Zhang et al., "Draft Model Knows When to Stop" (huggingface.co/papers/2411.18462).
"""

import inspect
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist, median
from typing import Any

import torch
from huggingface_hub.utils import tqdm
from transformers import PreTrainedModel

from ..errors import check_int, check_number
from ..models import base_of
from ..policy import LossyPolicy
from ..stops import SVIP


ENTROPY_FLOOR = 1e-6  # nats; below it γ = H_{q,p}/H_q would be a ratio of rounding errors
FEWEST = 20  # positions; with fewer, quantiles and fits mean nothing
LOG_ZERO = -708.0  # what log 0 counts as: exp(x) and exp(−x) are then finite and above 0 in float64


def bounds(p_logits: torch.Tensor, q_logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the target's and the draft's raw logits, both (N, V), say about acceptance at N positions.

    Returns tensors (N,), float64 but for the last: "entropy" H_q, "cross_entropy" H_{q,p} and "kl" KL(q‖p), all in nats;
    "beta" (Eq. 1); "pinsker" 1 − √(KL/2) (Eq. 3, 11; it may be negative); "bretagnolle_huber" 1 − √(1 − e^−KL) (Eq. 12);
    "gamma" H_{q,p}/H_q (Eq. 5), NaN where H_q < `ENTROPY_FLOOR`; "match" (bool): do both have the same argmax?
    """
    log_p, log_q = (x.double().log_softmax(dim=-1).clamp(min=LOG_ZERO) for x in (p_logits, q_logits))
    q, ratio = log_q.exp(), log_p - log_q
    entropy = -(q * log_q).sum(dim=-1)
    # Σ q·(e^r − 1) = Σ p − Σ q = 0: adding it changes nothing but leaves only terms ≥ 0. Nothing cancels, so Pinsker's bound
    # holds to the last digits even where p and q nearly agree.
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


def chosen_c(gamma: torch.Tensor, coverage: float) -> float:
    """The smallest c ≥ 0 with P(γ ≤ 2c + 1) ≥ `coverage` (Eq. 8) over `gamma` (N,), which holds no NaN."""
    rank = max(math.ceil(coverage * len(gamma) - 1e-9), 1)  # 0.07 · 100 is a hair above 7
    return max((float(gamma.kthvalue(rank).values) - 1) / 2, 0.0)


def fit_gamma(gamma: torch.Tensor) -> tuple[float, float] | None:
    """Shape α and rate β of γ − 1 ~ Gamma(α, β), by maximum likelihood over `gamma` (N,) (Eq. 9).

    γ = 1 has no density there and is left out. None where fewer than two different values remain: no Gamma law fits them.
    """
    from scipy import stats

    excess = (gamma - 1)[gamma > 1]
    if len(excess) < 2 or float(excess.std()) <= 1e-9 * float(excess.mean()):
        return None
    shape, _, scale = stats.gamma.fit(excess.cpu().numpy(), floc=0)
    return float(shape), float(1 / scale)


def reliability(c: float, found: Mapping[str, torch.Tensor], fit: tuple[float, float] | None) -> dict[str, Any]:
    """How safe `c` is, over what `bounds` found and `fit_gamma` made of it.

    "empirical", "gamma" (Eq. 9, 15; None without a fit) and "gaussian" (Eq. 14) are P(γ ≤ 2c + 1); "holds" is the share of
    positions with β ≥ 1 − √(c·H) (Eq. 6), and "mean" the mean of that bound, where below 0 counts as 0.
    """
    from scipy import stats

    gamma, bound = found["gamma"][~found["gamma"].isnan()], 1 - (c * found["entropy"]).sqrt()
    mean, spread, limit = float(gamma.mean()), float(gamma.std(correction=0)), 2 * c + 1
    return {
        "c": c,
        "empirical": float((gamma <= limit).double().mean()),
        "gamma": float(stats.gamma.cdf(2 * c, fit[0], scale=1 / fit[1])) if fit else None,
        "gaussian": NormalDist(mean, spread).cdf(limit) if spread else float(mean <= limit),
        "holds": _share(found["beta"], bound),
        "mean": float(bound.clamp(min=0).mean()),
    }


def replay(stops: torch.Tensor, accept: torch.Tensor, valid: torch.Tensor, longest: int) -> tuple[float, float, float]:
    """Expected target calls, drafted and accepted tokens when N texts are decoded in rounds of at most `longest` tokens.

    Args: `stops` (N, T) bool, the draft stops behind token t; `accept` (N, T) float64, the chance that token t of the text
    came from the draft if it was drafted; `valid` (N, T) bool, where the texts have tokens (a prefix of each row).

    Calls and accepted tokens are exact. A rejected draft is taken to go on along the text, for its own way is not known.
    """
    rows, width = accept.shape
    ends = stops | ~torch.cat([valid[:, 1:], torch.zeros_like(valid[:, :1])], dim=1)
    length, ahead = torch.zeros_like(accept), accept.new_zeros(rows)
    for t in reversed(range(width)):
        ahead = torch.where(ends[:, t], 1.0, ahead + 1)
        length[:, t] = ahead.clamp(max=longest)  # of a round that starts at t

    drafting = accept.new_zeros(rows, longest)  # [n]: probability of a round in which n tokens were accepted so far
    drafting[:, 0] = 1
    bonus = accept.new_zeros(rows)  # … in which all were: the next token is the target's own
    full = torch.arange(1, longest + 1, device=accept.device) == longest
    calls = drafted = accepted = accept.new_zeros(())
    for t in range(width):
        begun, kept = drafting[:, 0] * valid[:, t], drafting * accept[:, t, None]
        calls, drafted = calls + begun.sum(), drafted + (begun * length[:, t]).sum()
        accepted = accepted + (kept.sum(dim=1) * valid[:, t]).sum()
        fresh, over = (drafting - kept).sum(dim=1) + bonus, stops[:, t, None] | full
        bonus = (kept * over).sum(dim=1)
        drafting = torch.cat([fresh[:, None], (kept * ~over)[:, :-1]], dim=1)
    return float(calls), float(drafted), float(accepted)


@dataclass(frozen=True)
class SVIPCalibration:
    """What `calibrate_svip` found. Entropies are in nats, means and shares over all `positions`.

    A row of `reliability` is described there; a row of `grid` has "h" (None: constant length), "longest" draft, "draft_length"
    and "tokens_per_call" (means of a target call), "acceptance_rate" (accepted ÷ drafted), "speed" (1: the target alone).
    """

    stop: SVIP  # ready for `lossy_policy=`
    texts: int
    positions: int
    left_out: int  # positions with H < ENTROPY_FLOOR, so without a γ
    no_excess: int  # positions with γ = 1, left out of the Gamma fit alone
    means: dict[str, float]  # of what `bounds` returns; bounds below 0 count as 0
    holds: dict[str, float]  # "pinsker" and "bretagnolle_huber": shares of positions where β is not below the bound
    pinsker_gain: float  # mean Pinsker bound ÷ mean Bretagnolle–Huber bound − 1; about 0.11 in the paper
    gamma_std: float
    gamma_fit: tuple[float, float] | None  # shape α and rate β of γ − 1
    coverage: float
    c: float  # the smallest that covers it
    reliability: tuple[dict[str, Any], ...]  # of `c` and of the stop's own
    cost_ratio: float  # seconds of a draft step ÷ seconds of a target step
    grid: tuple[dict[str, Any], ...]
    best: dict[str, Any]
    constant: dict[str, Any]  # the fastest constant length, for comparison

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `LossyPolicy.from_dict({"stop": result["stop"]})` reads the stop back."""
        return asdict(self) | LossyPolicy(stop=self.stop).to_dict()

    def table(self) -> Any:
        """A `rich.table.Table` of everything."""
        from rich.table import Table

        table = Table("SVIP calibration", "", show_edge=False)
        table.columns[1].justify = "right"
        for line in _lines(self):
            table.add_row(*line)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=110, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def _lines(it: SVIPCalibration) -> list[tuple[str, str]]:
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
    for row in it.reliability:
        modelled = "–" if row["gamma"] is None else f"{row['gamma']:.1%}"
        name, shares = f"c = {row['c']:.4g}", f"{row['empirical']:.1%}, {modelled}, {row['gaussian']:.1%}"
        lines.append((f"{name}: P(γ ≤ 2c + 1) counted, Gamma, Gaussian", shares))
        lines.append((f"{name}: bound 1 − √(c·H), holds", f"{row['mean']:.3f}, {row['holds']:.1%}"))
    lines.append(("draft step ÷ target step", f"{it.cost_ratio:.3f}"))
    for row in (*it.grid, it.constant):
        name = f"constant {row['longest']}" if row["h"] is None else f"h = {row['h']:g}"
        figures = f"{row['draft_length']:.2f} drafted, {row['acceptance_rate']:.1%} accepted"
        best = " ← best h" if row is it.best else ""
        lines.append((name + best, f"{figures}, {row['tokens_per_call']:.2f} a call, speed {row['speed']:.2f}"))
    return [*lines, ("stop", str(it.stop))]


def calibrate_svip(
    target: Any, draft: Any, prompts: Sequence[Any], *, tokenizer: Any = None, max_new_tokens: int = 64,
    do_sample: bool = False, temperature: float = 1.0, batch_size: int = 8, coverage: float = 0.9, c: float = SVIP.c,
    form: str = "bound", thresholds: Sequence[float] | None = None, max_draft: int = SVIP.max_draft,
    cost_ratio: float | None = None, seed: int = 0,
) -> SVIPCalibration:  # fmt: skip
    """Measure SVIP's bound on texts that `target` writes, and choose the threshold that should decode them fastest.

    Args:
        target, draft (`PreTrainedModel`): decoder-only models with one tokenizer.
        prompts: held-out ones: id tensors (L,) or (1, L), int64 or int32, or texts, which need `tokenizer`.
        max_new_tokens, do_sample, temperature, seed: how the target continues each prompt. Bounds are of raw distributions;
            when sampling, `temperature` enters the replay. The random state outside is left as it was.
        coverage: the share of positions in (0, 1) at which the reported c must satisfy γ ≤ 2c + 1 (Eq. 8).
        c, form, max_draft: of the stop to return; only its h is chosen, from `thresholds` (default: 0, 0.3 and quantiles).
        cost_ratio: seconds of a draft step ÷ seconds of a target step; None measures bare one-token forwards at batch 1.

    A replayed text takes (target calls + cost_ratio · drafted tokens) target steps: a target call counts as one step however
    long its block, and `seconds` ÷ `forwards` of a real call's `SpeculationStats` give a ratio with all overhead.

    Raises: `ValueError` or `TypeError`, one line, for inputs that cannot work; `ImportError` without SciPy.
    """
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise ImportError("calibrate_svip needs SciPy: pip install hf_lossy_assist[train]") from None

    _check_numbers(coverage=coverage, temperature=temperature, c=c, cost_ratio=cost_ratio)
    check_int("max_new_tokens", max_new_tokens, 1)
    check_int("batch_size", batch_size, 1)
    stop = SVIP(SVIP.h, c, form, max_draft)
    rows = _read(target, draft, prompts, tokenizer)

    found, accept, valid = _measure(
        target, draft, rows, batch_size, seed, temperature if do_sample else None, max_new_tokens
    )
    gamma = found["gamma"][~found["gamma"].isnan()]
    if len(gamma) < FEWEST:
        raise ValueError(
            f"{len(gamma)} of {int(valid.sum())} positions have a draft entropy of at least {ENTROPY_FLOOR:g} nats, "
            f"too few: {FEWEST} are needed; pass more prompts or a larger max_new_tokens"
        )
    fit, fitted = fit_gamma(gamma), chosen_c(gamma, coverage)
    means = {name: float(x.double().clamp(min=0).nanmean()) for name, x in found.items()}
    cost_ratio = _cost_ratio(target, draft, rows[0]) if cost_ratio is None else cost_ratio
    grid, constant = _speeds(found["entropy"], accept, valid, stop, thresholds, cost_ratio)
    best = max(grid, key=lambda row: row["speed"])
    return SVIPCalibration(
        stop=replace(stop, h=best["h"]),
        texts=len(rows),
        positions=int(valid.sum()),
        left_out=int(valid.sum()) - len(gamma),
        no_excess=int((gamma == 1).sum()),
        means=means,
        holds={name: _share(found["beta"], found[name]) for name in ("pinsker", "bretagnolle_huber")},
        pinsker_gain=means["pinsker"] / max(means["bretagnolle_huber"], 1e-300) - 1,
        gamma_std=float(gamma.std(correction=0)),
        gamma_fit=fit,
        coverage=coverage,
        c=fitted,
        reliability=tuple(reliability(value, found, fit) for value in dict.fromkeys((fitted, c))),
        cost_ratio=cost_ratio,
        grid=grid,
        best=best,
        constant=constant,
    )


def _share(beta: torch.Tensor, bound: torch.Tensor) -> float:
    return float((beta + 1e-9 >= bound).double().mean())


def _check_numbers(**values: float | None) -> None:
    for name, value in values.items():
        high = 1.0 if name == "coverage" else math.inf
        if value is not None:
            check_number(name, value, 0.0, high)
            if value in (0.0, high):
                raise ValueError(f"{name}: expected a number above 0 and below {high:g}, got {value}")


def _read(target: Any, draft: Any, prompts: Any, tokenizer: Any) -> list[torch.Tensor]:
    """Check models and prompts; the prompts as ids (L,) on the CPU."""
    for name, model in (("target", target), ("draft", draft)):
        if not isinstance(base_of(model), PreTrainedModel):
            raise TypeError(f"{name}: expected a loaded Transformers model, got {type(model).__name__}")
        if base_of(model).config.is_encoder_decoder:
            raise ValueError(f"{name}: expected a decoder-only model, got the encoder-decoder {type(model).__name__}")
    sizes = [base_of(m).config.get_text_config(decoder=True).vocab_size for m in (target, draft)]
    if abs(sizes[0] - sizes[1]) > 0.02 * max(sizes):  # the rule of `lossy_policy=`: more than padding differs
        raise ValueError(f"the target has {sizes[0]} token ids, the draft {sizes[1]}: they need one tokenizer")
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: expected a list of id tensors or texts, got {type(prompts).__name__}")
    rows = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise TypeError(f"prompts[{i}] is a text: pass tokenizer=… as well")
            prompt = torch.tensor(tokenizer(prompt)["input_ids"], dtype=torch.int64)
        if not isinstance(prompt, torch.Tensor) or prompt.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"prompts[{i}]: expected a tensor of token ids or a text, got {type(prompt).__name__}")
        ids = prompt.cpu().long()
        ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
        if ids.dim() != 1 or not len(ids):
            raise ValueError(
                f"prompts[{i}]: expected at least 1 token of shape (L,) or (1, L), got {tuple(prompt.shape)}"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= min(sizes):
            raise ValueError(f"prompts[{i}]: token ids must be from 0 to {min(sizes) - 1}, for both models have these")
        rows.append(ids)
    if not rows:
        raise ValueError("prompts: expected at least one, got none")
    return rows


@torch.no_grad()
def _measure(
    target: Any, draft: Any, rows: list[torch.Tensor], batch_size: int, seed: int, temperature: float | None, new: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """What `bounds` finds at all positions, text by text; `accept` and `valid` (texts, new) as `replay` takes them."""
    found: list[dict[str, torch.Tensor]] = []
    accept, valid = torch.zeros(len(rows), new, dtype=torch.float64), torch.zeros(len(rows), new, dtype=torch.bool)
    for start in tqdm(range(0, len(rows), batch_size), desc="calibrate_svip"):
        ids, mask, real = _continue(target, rows[start : start + batch_size], seed + start, temperature, new)
        for name, model in (("target", target), ("draft", draft)):
            if int(ids.max()) >= base_of(model).get_input_embeddings().weight.shape[0]:
                raise ValueError(f"the target wrote token {int(ids.max())}, which the {name} does not have")
        logits = [_logits(model, ids, mask, real.shape[1]) for model in (target, draft)]
        for b, (p, q) in enumerate(zip(*logits, strict=True)):  # one text at a time: float64 laws are large
            p, q = p[real[b]], q[real[b]].to(p.device)[:, : p.shape[-1]]
            q = torch.nn.functional.pad(q, (0, p.shape[-1] - q.shape[-1]), value=-math.inf)
            found.append({name: x.cpu() for name, x in bounds(p, q).items()})
            if temperature is None:
                came = found[-1]["match"].double()
            else:
                token = ids[b, -real.shape[1] :][real[b]].to(p.device)[:, None]
                log_p, log_q = ((x.double() / temperature).log_softmax(dim=-1).gather(-1, token) for x in (p, q))
                # Strict acceptance writes x with p(x) in all and min(p, q)(x) by way of the draft, whatever q is.
                came = (log_q - log_p)[:, 0].clamp(max=0).exp().cpu()
            valid[start + b, : len(came)], accept[start + b, : len(came)] = True, came
    return {name: torch.cat([f[name] for f in found]) for name in found[0]}, accept, valid


def _continue(
    target: Any, rows: list[torch.Tensor], seed: int, temperature: float | None, new: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's own texts: ids and attention mask (B, prompt + new), and where the new tokens are real (B, new)."""
    base = base_of(target)
    device, width = base.get_input_embeddings().weight.device, max(map(len, rows))
    pad = torch.nn.functional.pad
    prompt = torch.stack([pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    # Neutral values, so that the target's generation config cannot warp the law that `_measure` takes its texts to follow.
    law: dict[str, Any] = {"top_p": 1.0, "typical_p": 1.0, "min_p": None, "repetition_penalty": 1.0, "num_beams": 1}
    greedy = temperature is None
    law |= {"do_sample": not greedy, "temperature": 1.0 if greedy else temperature, "top_k": 50 if greedy else 0}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        ids = type(base).generate(  # the class's: an enabled model's own may ask for a policy
            base, prompt.to(device), attention_mask=mask.to(device), max_new_tokens=new, pad_token_id=0, **law
        ).cpu()  # fmt: skip
    ends = base.generation_config.eos_token_id
    ended = torch.isin(ids[:, width:], torch.tensor([] if ends is None else ends, dtype=torch.int64)).long()
    real = ended.cumsum(dim=1) == ended  # up to the first end token, that one included
    mask = torch.cat([mask, real.long()], dim=1)
    return ids * mask, mask, real


def _logits(model: Any, ids: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
    """Raw logits (B, new, V) that the last `new` tokens were predicted by."""
    base = base_of(model)
    device, takes = base.get_input_embeddings().weight.device, inspect.signature(base.forward).parameters
    extra = {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0).to(device), "logits_to_keep": new + 1}
    extra = {name: value for name, value in extra.items() if name in takes}
    return base(input_ids=ids.to(device), attention_mask=mask.to(device), **extra).logits[:, -new - 1 : -1]


@torch.no_grad()
def _cost_ratio(target: Any, draft: Any, prompt: torch.Tensor, repeats: int = 12) -> float:
    """Median seconds of a cached one-token forward of the draft ÷ that of the target, taken in turn."""
    seconds: dict[str, list[float]] = {"target": [], "draft": []}
    caches: dict[str, Any] = {"target": None, "draft": None}
    for step in range(repeats + 3):  # a prefill and two steps to warm up
        for name, model in (("target", base_of(target)), ("draft", base_of(draft))):
            ids = (prompt[-1:] if step else prompt)[None].to(model.get_input_embeddings().weight.device)
            began = time.perf_counter()
            out = model(input_ids=ids, past_key_values=caches[name], use_cache=True)
            out.logits[0, -1, 0].item()  # waits for the device
            seconds[name].append(time.perf_counter() - began)
            caches[name] = out.past_key_values
    return median(seconds["draft"][3:]) / median(seconds["target"][3:])


def _speeds(
    entropy: torch.Tensor, accept: torch.Tensor, valid: torch.Tensor, stop: SVIP,
    thresholds: Sequence[float] | None, cost_ratio: float,
) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:  # fmt: skip
    """A row of the grid for each threshold, and the fastest constant length's."""
    signal = torch.zeros_like(accept)
    signal[valid] = ((stop.c if stop.form == "bound" else 1.0) * entropy).sqrt()
    if thresholds is None:
        levels = signal[valid].quantile(torch.linspace(0.05, 1, 20, dtype=torch.float64)).tolist()
        thresholds = sorted({0.0, SVIP.h, *(float(f"{level:.3g}") for level in levels)})

    def row(h: float | None, longest: int) -> dict[str, Any]:
        stops = signal > (math.inf if h is None else h)
        calls, drafted, accepted = replay(stops, accept, valid, longest)
        tokens = float(valid.sum())
        return {
            "h": h,
            "longest": longest,
            "draft_length": drafted / calls,
            "acceptance_rate": accepted / drafted,
            "tokens_per_call": tokens / calls,
            "speed": tokens / (calls + cost_ratio * drafted),
        }

    grid = tuple(row(h, stop.max_draft) for h in thresholds)
    constants = [row(None, longest) for longest in range(1, stop.max_draft + 1)]
    return grid, max(constants, key=lambda r: r["speed"])
