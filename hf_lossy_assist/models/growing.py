"""Inputs with an entry for each token of the text, grown as the text grows: as `generate` grows them from one token to the next."""

from typing import Any

import torch


MASK, POSITIONS = "attention_mask", "position_ids"
REPEATED, ZERO = ("token_type_ids", "moe_mm_token_type_ids"), ("mm_token_type_ids",)
GROWING = (MASK, POSITIONS, *REPEATED, *ZERO)


class GrowingInputs:
    """The mask, positions and token types of a prompt (…, width), and what they are for a text with more tokens behind it."""

    def __init__(self, mask: torch.Tensor | None, others: dict[str, torch.Tensor], prefix: str = ""):
        """`mask`: (1, width), 0 where a token is hidden; None: nothing is. `prefix` of the mask's name in the model's forward."""
        self.mask, self.others, self.prefix = mask, others, prefix

    @classmethod
    def taken_from(cls, model_kwargs: dict[str, Any], encoder_decoder: bool, device: torch.device) -> "GrowingInputs":
        """Takes them out of `model_kwargs` and onto `device`. An encoder-decoder's `attention_mask` belongs to its encoder and stays."""
        prefix = "decoder_" if encoder_decoder else ""
        names = (prefix + MASK, prefix + POSITIONS, *REPEATED, *ZERO)
        given = {name: model_kwargs.pop(name, None) for name in names}
        given = {name: value.to(device) for name, value in given.items() if value is not None}
        return cls(given.pop(prefix + MASK, None), given, prefix)

    def seen(self, width: int) -> list[int]:
        """The places in a prompt of `width` that the mask does not hide."""
        return list(range(width)) if self.mask is None else self.mask[0].nonzero()[:, 0].tolist()

    def up_to(self, length: int) -> dict[str, torch.Tensor]:
        """Each input for the first `length` places of the text: (…, length)."""
        out = {} if self.mask is None else {self.prefix + MASK: _grown(self.mask, length, "ones")}
        for name, value in self.others.items():
            how = "counted" if name.endswith(POSITIONS) else "repeated" if name in REPEATED else "zeros"
            out[name] = _grown(value, length, how)
        return out


def _grown(value: torch.Tensor, length: int, how: str) -> torch.Tensor:
    more = length - value.shape[-1]
    if more <= 0:
        return value[..., :length]
    new = value[..., -1:].expand(*value.shape[:-1], more)
    if how == "ones":
        new = torch.ones_like(new)
    elif how == "zeros":
        new = torch.zeros_like(new)
    elif how == "counted":
        new = new + torch.arange(1, more + 1, dtype=value.dtype, device=value.device)
    return torch.cat([value, new], dim=-1)
