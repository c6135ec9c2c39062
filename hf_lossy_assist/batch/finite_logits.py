"""Logits that make no distribution, NaN, +inf or −inf everywhere: found without a look at the device of their own, refused where the text comes to them."""

from collections.abc import Callable, Mapping

import torch

from ..round import Verified
from ..vocabulary import looks_are_free


def sound(verified: Verified) -> dict[str, torch.Tensor]:
    """Of each model, at how many places in a row from the first its logits make a distribution, (B,) int64."""
    draft, companion = verified.draft, verified.selection.companion
    gamma = draft.gamma
    places = torch.arange(gamma + 1, device=verified.logits.device)
    fine = {"target": _finite(verified.logits.amax(dim=-1)) | (places > verified.sent[:, None])}
    beyond = places[:gamma] >= draft.lengths[:, None]
    if draft.validity is not None:
        fine["draft"] = _finite(draft.validity) | beyond
    if companion is not None:
        fine["companion"] = _finite(companion[:, :gamma, 0]) | beyond
    return {model: its.long().cumprod(dim=1).sum(dim=1) for model, its in fine.items()}


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Return `isfinite` of each value in half as many operations: x − x is NaN for the others."""
    return (x - x) == 0


def refuse_invalid_logits(
    good: Mapping[str, int],
    taken: int,
    gamma: int,
    row: int,
    written: int,
    blame: Callable[[int], str | None] = lambda place: None,
) -> None:
    """Raise `ValueError` where one of the `taken` tokens of a round came from no distribution; `good`: `sound` of this row.

    `blame` says which processor makes no distribution at a place of the round, if it was one. Where the text does not come to such a
    place (behind a rejected draft, a grammar may have no way on), it is no error.
    """
    for model, places in good.items():
        if places >= min(taken, gamma + (model == "target")):
            continue
        processor = blame(places) if model == "target" else None
        what = (
            f"the {model} model gave NaN or infinite logits" if processor is None else f"logits_processor: {processor}"
        )
        raise ValueError(f"{what} in row {row}, after {written + places} new tokens")


def keep_one_token(scores: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """Where the processors left the draft none of the tokens that it knows, it is certain of token 0: any guess will do. (B, V) each."""
    nothing = (scores.amax(dim=-1) == float("-inf")) & raw.amax(dim=-1).isfinite()
    if looks_are_free(nothing) and not bool(nothing.any()):
        return scores
    return torch.cat([scores[:, :1].masked_fill(nothing[:, None], 0.0), scores[:, 1:]], dim=1)
