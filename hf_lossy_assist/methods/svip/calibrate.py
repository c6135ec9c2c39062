"""Fit SVIP to a pair of models: how good its bound is on their texts, and which threshold should be fastest.

p = target, q = draft, H = entropy of q in nats, β = Σ min(p, q), the chance that a drafted token is accepted under sampling.
Equations are those of Zhang et al., "Draft Model Knows When to Stop" (huggingface.co/papers/2411.18462).
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from huggingface_hub.utils import tqdm

from ...drafters.eagle import PLACES
from ...drafters.hidden_state import HiddenStateDrafter
from ...models.introspection import base_of
from ...stops.confidence import SVIP
from ...validation import MOST_NEW_TOKENS, MOST_ROWS, check_flag, check_int
from .bounds import ENTROPY_FLOOR, SVIPCalibration, bounds, judge, replay
from .costs import measured_ratio
from .inputs import check_settings, read_prompts


FEWEST = 20  # positions; with fewer, quantiles and fits mean nothing


def calibrate_svip(
    target: Any, draft: Any, prompts: Sequence[Any], *, tokenizer: Any = None, max_new_tokens: int = 64,
    do_sample: bool = False, temperature: float = 1.0, batch_size: int = 8, coverage: float = 0.9, c: float = SVIP.c,
    form: str = "bound", thresholds: Sequence[float] | None = None, max_draft: int = SVIP.max_draft,
    cost_ratio: float | None = None, seed: int = 0,
) -> SVIPCalibration:  # fmt: skip
    """Measure SVIP's bound on texts that `target` writes, and choose the threshold that should decode them fastest.

    Args:
        target, draft (`PreTrainedModel`): decoder-only models with one tokenizer; the draft may be an EAGLE drafter.
        prompts: held-out ones: id tensors (L,) or (1, L), int64 or int32, or texts, which need `tokenizer`.
        max_new_tokens, do_sample, temperature, seed: how the target continues each prompt. Bounds are of raw distributions;
            when sampling, `temperature` enters the replay. The random state outside is left as it was.
        coverage: the share of positions in (0, 1) at which the reported c must satisfy γ ≤ 2c + 1 (Eq. 8).
        c, form, max_draft: of the stop to return; only its h is chosen, from `thresholds` (default: about 25 that fit the texts).
        cost_ratio: seconds of a draft step ÷ seconds of a target step; None measures bare one-token forwards at batch 1.

    A replayed text takes (target calls + cost_ratio · drafted tokens) target steps: a target call counts as one step however
    long its block, and `seconds` ÷ `forwards` of a real call's `SpeculationStats` give a ratio with all overhead.

    Raises: `ValueError` or `TypeError`, one line, for inputs that cannot work; `ImportError` without SciPy.
    """
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise ImportError("calibrate_svip needs SciPy: pip install hf_lossy_assist[train]") from None

    check_settings(thresholds or (), coverage=coverage, temperature=temperature, c=c, cost_ratio=cost_ratio)
    check_int("max_new_tokens", max_new_tokens, 1, MOST_NEW_TOKENS)
    check_int("batch_size", batch_size, 1, MOST_ROWS)
    check_int("seed", seed, 0)
    check_flag("do_sample", do_sample)
    stop = SVIP(SVIP.h, c, form, max_draft)
    rows = read_prompts(target, draft, prompts, tokenizer)

    warmth = temperature if do_sample else None
    found, accept, valid = _measure(target, draft, rows, batch_size, seed, warmth, max_new_tokens)
    gamma = found["gamma"][~found["gamma"].isnan()]
    if len(gamma) < FEWEST:
        raise ValueError(
            f"{len(gamma)} of {int(valid.sum())} positions have a draft entropy of at least {ENTROPY_FLOOR:g} nats, "
            f"too few: {FEWEST} are needed; pass more prompts or a larger max_new_tokens"
        )
    if cost_ratio is None:
        cost_ratio = measured_ratio(target, draft, rows[0])
    grid, constant = _speeds(found["entropy"], accept, valid, stop, thresholds, cost_ratio)
    best = max(grid, key=lambda row: row["speed"])
    return SVIPCalibration(
        stop=replace(stop, h=best["h"]),
        texts=len(rows),
        **judge(found, gamma, coverage, c),
        cost_ratio=cost_ratio,
        grid=grid,
        best=best,
        constant=constant,
    )


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
            if (
                not isinstance(model, HiddenStateDrafter)
                and int(ids.max()) >= base_of(model).get_input_embeddings().weight.shape[0]
            ):
                raise ValueError(f"the target wrote token {int(ids.max())}, which the {name} does not have")
        of_draft = _logits_of_drafter if isinstance(draft, HiddenStateDrafter) else _logits
        logits = [_logits(target, ids, mask, real.shape[1]), of_draft(draft, ids, mask, real.shape[1], target)]
        for b, (p, q) in enumerate(zip(*logits, strict=True)):  # one text at a time: float64 distributions are large
            p, q = p[real[b]], q[real[b]].to(p.device)[:, : p.shape[-1]]
            q = torch.nn.functional.pad(q, (0, p.shape[-1] - q.shape[-1]), value=-math.inf)
            found.append({name: x.cpu() for name, x in bounds(p, q).items()})
            if bool(found[-1]["kl"].isnan().any()):
                raise ValueError(f"the target or the draft gave NaN logits on the text of prompts[{start + b}]")
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
    # Neutral values, so that the target's generation config cannot warp the distribution that `_measure` takes its texts to follow.
    sampling: dict[str, Any] = {
        "top_p": 1.0,
        "typical_p": 1.0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "num_beams": 1,
    }
    greedy = temperature is None
    sampling |= {"do_sample": not greedy, "temperature": 1.0 if greedy else temperature, "top_k": 50 if greedy else 0}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        ids = type(base).generate(  # the class's: an enabled model's own may ask for a policy
            base, prompt.to(device), attention_mask=mask.to(device), max_new_tokens=new, pad_token_id=0, **sampling
        ).cpu()  # fmt: skip
    ends = base.generation_config.eos_token_id
    ended = torch.isin(ids[:, width:], torch.tensor([] if ends is None else ends, dtype=torch.int64)).long()
    real = ended.cumsum(dim=1) == ended  # up to the first end token, that one included
    mask = torch.cat([mask, real.long()], dim=1)
    return ids * mask, mask, real


def _logits(model: Any, ids: torch.Tensor, mask: torch.Tensor, new: int, target: Any = None) -> torch.Tensor:
    """Raw logits (B, new, V) that the last `new` tokens were predicted by."""
    base = base_of(model)
    device, takes = base.get_input_embeddings().weight.device, inspect.signature(base.forward).parameters
    extra = {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0).to(device), "logits_to_keep": new + 1}
    extra = {name: value for name, value in extra.items() if name in takes}
    return base(input_ids=ids.to(device), attention_mask=mask.to(device), **extra).logits[:, -new - 1 : -1]


def _logits_of_drafter(
    drafter: HiddenStateDrafter, ids: torch.Tensor, mask: torch.Tensor, new: int, target: Any
) -> torch.Tensor:
    """Compute what `_logits` does for a drafter on the target's states; after the end of a text the values mean nothing."""
    reader, found = drafter.hook(target), []
    for text, seen in zip(ids, mask.bool(), strict=True):
        end = int(seen.nonzero()[-1]) + 1  # the real ones of the new tokens are a prefix of them
        whole = text[:end][seen[:end]].to(target.device)[:-1]
        count = end - (len(text) - new)
        with reader:
            target(whole[None, :-1], use_cache=False)
            states = reader.take()
        assert states is not None, "the target has just run"
        said = drafter.logits_along(target, whole, states[0], count, PLACES)
        found.append(torch.nn.functional.pad(said, (0, 0, 0, new - count)))
    return torch.stack(found)


def _speeds(
    entropy: torch.Tensor, accept: torch.Tensor, valid: torch.Tensor, stop: SVIP,
    thresholds: Sequence[float] | None, cost_ratio: float,
) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:  # fmt: skip
    """A row of the grid for each threshold, and the fastest constant length's."""
    signal = torch.zeros_like(accept)
    signal[valid] = ((stop.c if stop.form == "bound" else 1.0) * entropy).sqrt()
    if not thresholds:
        # Quantiles find where most positions lie; even steps search the few uncertain ones, which decide the speed.
        seen, steps = signal[valid], torch.arange(1, 13, dtype=torch.float64) / 12
        levels = [*seen.quantile(steps).tolist(), *(seen.max() * steps).tolist()]
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
