"""Fit SVIP to a pair of models: measure its bound on their texts, and choose the threshold with the highest predicted speed.

p = target, q = draft, H = entropy of q in nats, β = Σ min(p, q), the probability that a drafted token is accepted in sampling. Equations are those
of Zhang et al., "Draft Model Knows When to Stop" (huggingface.co/papers/2411.18462).
"""

import inspect
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from huggingface_hub.utils import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafters.eagle import PLACES
from ...drafters.hidden_state import DraftModel, HiddenStateDrafter
from ...models.compat import CACHE, cache_of
from ...models.introspection import base_of, device_of, end_tokens, tokens_known, vocabulary_of
from ...stops.confidence import SVIP
from ...validation import MOST_FACTOR, MOST_NEW_TOKENS, MOST_ROWS, check_flag, check_int, check_number, require
from .calibration_report import ENTROPY_FLOOR, GridRow, SVIPCalibration, compute_bounds, describe_bounds, replay


FEWEST = 20  # positions; fewer are too few for quantiles and fits
WARM_UP = 3  # a prefill and two steps


def calibrate_svip(
    target: PreTrainedModel, draft: DraftModel, prompts: Sequence[object], *, tokenizer: PreTrainedTokenizerBase | None = None, max_new_tokens: int = 64,
    do_sample: bool = False, temperature: float = 1.0, batch_size: int = 8, coverage: float = 0.9, c: float = SVIP.c,
    form: str = "bound", thresholds: Sequence[float] | None = None, max_draft: int = SVIP.max_draft,
    cost_ratio: float | None = None, seed: int = 0,
) -> SVIPCalibration:  # fmt: skip
    """Measure SVIP's bound on texts written by `target`, and choose the threshold that should decode them fastest.

    Args:
        target, draft (`PreTrainedModel`): decoder-only models with one tokenizer; the draft may be an EAGLE drafter.
        prompts: held-out ones: id tensors (L,) or (1, L), int64 or int32, or texts, which need `tokenizer`.
        max_new_tokens, do_sample, temperature, seed: how the target continues each prompt. Bounds are those of raw distributions;
            in sampling, `temperature` enters the replay. The global random state is not changed.
        coverage: the share of positions, in (0, 1), at which the reported c must satisfy γ ≤ 2c + 1 (Eq. 8).
        c, form, max_draft: of the stop to return; only its h is chosen, from `thresholds` (default: about 25 that fit the texts).
        cost_ratio: seconds of a draft step ÷ seconds of a target step; None measures bare one-token forwards at batch 1.

    The predicted time of a text is (target calls + cost_ratio · drafted tokens) target steps: a target call counts as one step whatever its block
    length. `seconds` ÷ `forwards` in a real call's `SpeculationStats` give a ratio with all overhead.

    Raises: `ValueError` or `TypeError`, one line, for invalid inputs; `ImportError` without SciPy.
    """
    require("calibrate_svip", "scipy")
    for h in thresholds or ():
        check_number("thresholds", h, 0.0, math.inf)
    for name, value, high in (
        ("coverage", coverage, 1.0),
        ("temperature", temperature, MOST_FACTOR),
        ("c", c, MOST_FACTOR),
        ("cost_ratio", cost_ratio, MOST_FACTOR),
    ):
        if value is not None:
            check_number(name, value, 0.0, high)
            if value in (0.0, high):
                raise ValueError(f"{name}: expected a number above 0 and below {high:g}, got {value}")
    check_int("max_new_tokens", max_new_tokens, 1, MOST_NEW_TOKENS)
    check_int("batch_size", batch_size, 1, MOST_ROWS)
    check_int("seed", seed, 0)
    check_flag("do_sample", do_sample)
    stop = SVIP(SVIP.h, c, form, max_draft)
    rows = _read_prompts(target, draft, prompts, tokenizer)

    sampled_at = temperature if do_sample else None
    found, accept, valid = _measure(target, draft, rows, batch_size, seed, sampled_at, max_new_tokens)
    gamma = found["gamma"][~found["gamma"].isnan()]
    if len(gamma) < FEWEST:
        raise ValueError(
            f"{len(gamma)} of {int(valid.sum())} positions have a draft entropy of at least {ENTROPY_FLOOR:g} nats, "
            f"too few: {FEWEST} are needed; pass more prompts or a larger max_new_tokens"
        )
    if cost_ratio is None:
        cost_ratio = measure_cost_ratio(target, draft, rows[0])
    grid, constant = _speeds(found["entropy"], accept, valid, stop, thresholds, cost_ratio)
    best = max(grid, key=lambda row: row["speed"])
    assert best["h"] is not None, "the rows of the grid have thresholds"
    return SVIPCalibration(
        stop=replace(stop, h=best["h"]),
        texts=len(rows),
        **describe_bounds(found, gamma, coverage, c),
        cost_ratio=cost_ratio,
        grid=grid,
        best=best,
        constant=constant,
    )


@torch.no_grad()
def _measure(
    target: PreTrainedModel,
    draft: DraftModel,
    rows: list[torch.Tensor],
    batch_size: int,
    seed: int,
    temperature: float | None,
    new: int,
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return the bounds at all positions, text by text, and `accept` and `valid` (texts, new) for `replay`."""
    found: list[dict[str, torch.Tensor]] = []
    accept, valid = torch.zeros(len(rows), new, dtype=torch.float64), torch.zeros(len(rows), new, dtype=torch.bool)
    for start in tqdm(range(0, len(rows), batch_size), desc="calibrate_svip"):
        ids, mask, real = _continue(target, rows[start : start + batch_size], seed + start, temperature, new)
        for name, model in (("target", target), ("draft", draft)):
            if not isinstance(model, HiddenStateDrafter) and int(ids.max()) >= tokens_known(model):
                raise ValueError(f"the target wrote token {int(ids.max())}, which the {name} does not have")
        logits = [_compute_logits(model, ids, mask, real.shape[1], target) for model in (target, draft)]
        for b, (p, q) in enumerate(zip(*logits, strict=True)):  # one text at a time: float64 distributions are large
            p, q = p[real[b]], q[real[b]].to(p.device)[:, : p.shape[-1]]
            q = torch.nn.functional.pad(q, (0, p.shape[-1] - q.shape[-1]), value=-math.inf)
            found.append({name: x.cpu() for name, x in compute_bounds(p, q).items()})
            if bool(found[-1]["kl"].isnan().any()):
                raise ValueError(f"the target or the draft gave NaN logits on the text of prompts[{start + b}]")
            if temperature is None:
                chance = found[-1]["match"].double()
            else:
                token = ids[b, -real.shape[1] :][real[b]].to(p.device)[:, None]
                log_p, log_q = ((x.double() / temperature).log_softmax(dim=-1).gather(-1, token) for x in (p, q))
                # Strict acceptance outputs x with p(x) in total and min(p, q)(x) by accepting it from the draft.
                chance = (log_q - log_p)[:, 0].clamp(max=0).exp().cpu()
            valid[start + b, : len(chance)], accept[start + b, : len(chance)] = True, chance
    return {name: torch.cat([f[name] for f in found]) for name in found[0]}, accept, valid


def _continue(
    target: PreTrainedModel, rows: list[torch.Tensor], seed: int, temperature: float | None, new: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Let the target write texts; return ids and attention mask (B, prompt + new), and which new tokens are real (B, new)."""
    base = base_of(target)
    device, width = device_of(base), max(map(len, rows))
    pad = torch.nn.functional.pad
    prompt = torch.stack([pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    # Neutral values, so that the target's generation config cannot change the distribution that `_measure` assumes for its texts.
    greedy = temperature is None
    sampling: dict[str, object] = {
        "do_sample": not greedy,
        "temperature": 1.0 if greedy else temperature,
        "top_k": 50 if greedy else 0,
        "top_p": 1.0,
        "typical_p": 1.0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "num_beams": 1,
    }
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        settings = {"attention_mask": mask.to(device), "max_new_tokens": new, "pad_token_id": 0, **sampling}
        # The class's method, since an enabled model's may require a policy.
        ids = type(base).generate(base, prompt.to(device), **settings).cpu()
    ends = torch.tensor(list(end_tokens(base.generation_config)), dtype=torch.int64)
    ended = torch.isin(ids[:, width:], ends).long()
    real = ended.cumsum(dim=1) == ended  # up to and including the first end token
    mask = torch.cat([mask, real.long()], dim=1)
    return ids * mask, mask, real


def _compute_logits(
    model: DraftModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    new: int,
    target: PreTrainedModel,
) -> torch.Tensor:
    """Return the raw logits (B, new, V) that predict the last `new` tokens; those after the end of a text are meaningless."""
    if isinstance(model, HiddenStateDrafter):
        return _compute_drafter_logits(model, ids, mask, new, target)
    base = base_of(model)
    device, takes = device_of(base), inspect.signature(base.forward).parameters
    extra = {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0).to(device), "logits_to_keep": new + 1}
    extra = {name: value for name, value in extra.items() if name in takes}
    return base(input_ids=ids.to(device), attention_mask=mask.to(device), **extra).logits[:, -new - 1 : -1]


def _compute_drafter_logits(
    drafter: HiddenStateDrafter, ids: torch.Tensor, mask: torch.Tensor, new: int, target: PreTrainedModel
) -> torch.Tensor:
    found = []
    for text, seen in zip(ids, mask.bool(), strict=True):
        end = int(seen.nonzero()[-1]) + 1  # the real ones among the new tokens come first
        whole = text[:end][seen[:end]].to(target.device)[:-1]
        count = end - (len(text) - new)
        logits = drafter.logits_along(target, whole, drafter.hook(target).read(target, whole[:-1]), count, PLACES)
        found.append(torch.nn.functional.pad(logits, (0, 0, 0, new - count)))
    return torch.stack(found)


def _speeds(
    entropy: torch.Tensor,
    accept: torch.Tensor,
    valid: torch.Tensor,
    stop: SVIP,
    thresholds: Sequence[float] | None,
    cost_ratio: float,
) -> tuple[tuple[GridRow, ...], GridRow]:
    """Return a row of the grid for each threshold, and the row of the fastest constant length."""
    signal = torch.zeros_like(accept)
    signal[valid] = ((stop.c if stop.form == "bound" else 1.0) * entropy).sqrt()
    if not thresholds:
        # Quantiles cover most positions; even steps cover the few uncertain ones, which determine the speed.
        seen, steps = signal[valid], torch.arange(1, 13, dtype=torch.float64) / 12
        levels = [*seen.quantile(steps).tolist(), *(seen.max() * steps).tolist()]
        thresholds = sorted({0.0, SVIP.h, *(float(f"{level:.3g}") for level in levels)})

    def make_row(h: float | None, longest: int) -> GridRow:
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

    grid = tuple(make_row(h, stop.max_draft) for h in thresholds)
    constants = [make_row(None, longest) for longest in range(1, stop.max_draft + 1)]
    return grid, max(constants, key=lambda r: r["speed"])


@torch.no_grad()
def measure_cost_ratio(target: PreTrainedModel, draft: DraftModel, prompt: torch.Tensor, repeats: int = 12) -> float:
    """Return the median seconds of a cached one-token forward of the draft ÷ that of the target, measured alternately."""
    seconds: dict[str, list[float]] = {"target": [], "draft": []}
    drafting = _run_steps(draft, prompt)
    if isinstance(draft, HiddenStateDrafter):
        drafting = _run_drafter(draft, target, prompt, len(prompt) + repeats + WARM_UP)
    steps = {"target": _run_steps(target, prompt), "draft": drafting}
    for _ in range(repeats + WARM_UP):
        for name, each in steps.items():
            began = time.perf_counter()
            next(each)
            seconds[name].append(time.perf_counter() - began)
    return median(seconds["draft"][WARM_UP:]) / median(seconds["target"][WARM_UP:])


def _run_steps(model: PreTrainedModel, prompt: torch.Tensor) -> Iterator[None]:
    """Run the prompt's forward, then one token per step, endlessly."""
    base, cache, ids = base_of(model), None, prompt
    while True:
        out = base(input_ids=ids[None].to(device_of(base)), **{CACHE: cache}, use_cache=True)
        out.logits[0, -1, 0].item()  # waits for the device
        cache, ids = cache_of(out), prompt[-1:]
        yield


def _run_drafter(
    drafter: HiddenStateDrafter, target: PreTrainedModel, prompt: torch.Tensor, limit: int
) -> Iterator[None]:
    """Run the same with a drafter on the target's states, up to `limit` tokens."""
    ids = prompt[None].to(device_of(target))
    model = drafter.make_model(target, 1, limit, vocabulary_of(target))
    model.learn(drafter.hook(target).read(target, ids[0, :-1])[None], [len(prompt) - 1])
    feed = ids[:, 1:]
    while True:
        model.feed(feed, [feed.shape[1]], keep=1)[0, -1, 0].item()
        feed = ids[:, -1:]
        yield


def _read_prompts(
    target: PreTrainedModel, draft: DraftModel, prompts: object, tokenizer: PreTrainedTokenizerBase | None
) -> list[torch.Tensor]:
    """Check models and prompts; return the prompts as ids (L,) on the CPU."""
    known = _count_shared_tokens(target, draft)
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: expected a list of id tensors or texts, got {type(prompts).__name__}")
    rows = [_read_ids(f"prompts[{i}]", prompt, tokenizer, known) for i, prompt in enumerate(prompts)]
    if isinstance(draft, HiddenStateDrafter) and (short := [i for i, row in enumerate(rows) if len(row) < 2]):
        raise ValueError(
            f"prompts[{short[0]}]: {draft.kind} drafts behind two tokens or more, and this prompt has one: leave it out"
        )
    if not rows:
        raise ValueError("prompts: expected at least one, got none")
    return rows


def _count_shared_tokens(target: PreTrainedModel, draft: DraftModel) -> int:
    """Return the number of token ids that both models have; refuse models that cannot be calibrated."""
    models = [("target", target), ("draft", draft)]
    if isinstance(draft, HiddenStateDrafter):
        if not draft.drafts_each_place:
            raise ValueError(
                f"draft: {draft.kind} fills in a block for each token: calibrate with an EAGLE drafter or a draft model"
            )
        draft.check(target)
        models = models[:1]
    elif getattr(getattr(base_of(draft), "config", None), "pard_token", None) is not None:
        raise ValueError(
            "draft: a model with a pard_token drafts after mask tokens, which its texts here have none of: delete it from the config to calibrate "
            "it as it drafts token by token"
        )
    for name, model in models:
        if not isinstance(base_of(model), PreTrainedModel):
            raise TypeError(f"{name}: expected a loaded Transformers model, got {type(model).__name__}")
        if base_of(model).config.is_encoder_decoder:
            raise ValueError(f"{name}: expected a decoder-only model, got the encoder-decoder {type(model).__name__}")
    sizes = [vocabulary_of(model) for _, model in models]
    if abs(sizes[0] - sizes[-1]) > 0.02 * max(sizes):  # as for `lossy_policy=`: padding alone differs by less
        raise ValueError(f"the target has {sizes[0]} token ids, the draft {sizes[-1]}: they need one tokenizer")
    return min(sizes)


def _read_ids(name: str, prompt: object, tokenizer: PreTrainedTokenizerBase | None, known: int) -> torch.Tensor:
    """Return a prompt's ids (L,), all below `known`."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(f"{name} is a text: pass tokenizer=… as well")
        prompt = torch.tensor(tokenizer(prompt)["input_ids"], dtype=torch.int64)
    if not isinstance(prompt, torch.Tensor) or prompt.dtype not in (torch.int64, torch.int32):
        kind = getattr(prompt, "dtype", type(prompt).__name__)
        raise TypeError(f"{name}: expected an int64 tensor of token ids or a text, got {kind}")
    ids = prompt.cpu().long()
    ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
    if ids.dim() != 1 or not len(ids):
        raise ValueError(f"{name}: expected at least 1 token of shape (L,) or (1, L), got {tuple(prompt.shape)}")
    if int(ids.min()) < 0 or int(ids.max()) >= known:
        raise ValueError(f"{name}: token ids must be from 0 to {known - 1}, for both models have these")
    return ids
