"""What a model gives one token at a time, as `generate` comes by it, without this package: the measure of a trial."""

from typing import Any

import torch
from transformers import DynamicCache

from .cache_name import CACHE
from .calling import forward_of


EXACT = (torch.float32, torch.float64)
COARSE = 0.1  # of the largest logit: a wrong state is further off, however coarse a model's numbers are


def behind(texts: torch.Tensor, starts: torch.Tensor, width: int) -> torch.Tensor:
    """Of each text, (B, n), the tokens from place `starts[b]` on, (B, width); any where it has ended."""
    places = starts[:, None] + torch.arange(width, device=texts.device)
    return texts.gather(1, places.clamp(max=texts.shape[1] - 1))


def one_by_one(base: Any, text: torch.Tensor, n: int) -> torch.Tensor:
    """The logits behind `text`'s tokens from place n on, (BLOCK + 1, V), as `generate` comes by them, without this package."""
    cache = DynamicCache(config=base.config.get_text_config(decoder=True))
    places, out = torch.arange(len(text), device=text.device), []
    for part in [slice(0, n), *(slice(i, i + 1) for i in range(n, len(text)))]:
        ids, positions = text[None, part], places[None, part]
        run = forward_of(base, base)
        out.append(run(input_ids=ids, position_ids=positions, **{CACHE: cache}, use_cache=True).logits[0, -1])
    return torch.stack(out[1:])


def rounding(base: Any, texts: torch.Tensor, n: int, wanted: list[torch.Tensor]) -> float:
    """How far a model in half precision is from itself, of its largest logit: read in one forward, and one token at a time.

    Mamba-2's steps round more than its scan does. `wanted`: what `one_by_one` gives of each text from place n on.
    """
    if base.dtype in EXACT:
        return 0.0
    run, off = forward_of(base, base), 0.0
    for text, its in zip(texts, wanted, strict=True):
        whole = run(input_ids=text[None], use_cache=False).logits[0, n:].float()
        off = max(off, float((whole[: len(its)] - its.float()).abs().max() / its.float().abs().max()))
    return off


def same(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, own: float = 0.0) -> bool:
    """Whether these logits are alike to what rounding does in `dtype`; `own`: as `rounding` says of the model."""
    tolerance = 1e-4 if dtype in EXACT else min(max(0.02, 3 * own), COARSE)
    got, wanted = got.float(), wanted.float()
    return torch.allclose(got, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))
