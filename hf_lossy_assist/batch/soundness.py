"""Logits that make no law, NaN, +inf or −inf everywhere: found without a look at the device of their own, refused where the text comes to them."""

from collections.abc import Mapping

import torch

from ..round import Block


def sound(block: Block, peaks: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Of each model, at how many places in a row from the first its logits make a law, (B,) int64.

    `peaks` (B, γ): a number of each drafted token's law that is not finite where there is none; None: the drafts have no laws.
    """
    assert block.scores is not None and block.kept is not None
    gamma = block.tokens.shape[1]
    places = torch.arange(gamma + 1, device=block.scores.device)
    fine = {"target": _finite(block.scores.amax(dim=-1)) | (places > block.kept[:, None])}
    beyond = places[:gamma] >= block.drafted[:, None]
    if peaks is not None:
        fine["draft"] = _finite(peaks) | beyond
    if block.companion is not None:
        fine["companion"] = _finite(block.companion[:, :gamma, 0]) | beyond
    return {model: its.long().cumprod(dim=1).sum(dim=1) for model, its in fine.items()}


def _finite(x: torch.Tensor) -> torch.Tensor:
    """As `isfinite`, in half as many operations: x − x is NaN for the others."""
    return (x - x) == 0


def refuse_unsound(good: Mapping[str, int], taken: int, gamma: int, row: int, written: int) -> None:
    """Raise `ValueError` where one of the `taken` tokens of a round came from no law; `good`: `sound` of this row.

    Where the text does not come to such a place (behind a rejected draft, a grammar may have no way on), it is no error.
    """
    for model, places in good.items():
        if places < min(taken, gamma + (model == "target")):
            raise ValueError(
                f"the {model} model gave NaN or infinite logits in row {row}, after {written + places} new tokens"
            )


def something(scores: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """Where the processors left the draft none of the tokens that it knows, it is certain of token 0: any guess will do. (B, V) each."""
    nothing = (scores.amax(dim=-1) == float("-inf")) & raw.amax(dim=-1).isfinite()
    return torch.cat([scores[:, :1].masked_fill(nothing[:, None], 0.0), scores[:, 1:]], dim=1)
