"""Tensors that a call is given: prompts and masks of a wrong kind are refused by name, before a model trips over them."""

from collections.abc import Mapping
from typing import Any

import torch

from ..models.introspection import device_of, tokens_known


def refuse_ids(name: str, ids: Any) -> None:
    """Refuse what is no dense tensor (B, length) of whole numbers."""
    if isinstance(ids, Mapping):
        raise TypeError(
            f"{name}: expected a tensor of shape (batch, length), got {type(ids).__name__}, all that a tokenizer returned: "
            "unpack it, generate(**inputs, …)"
        )
    if not isinstance(ids, torch.Tensor):
        raise TypeError(
            f"{name}: expected a tensor of shape (batch, length), got {type(ids).__name__}; "
            "pass return_tensors='pt' to the tokenizer"
        )
    if ids.is_nested:
        raise ValueError(
            f"{name}: expected a dense tensor of shape (batch, length), got a nested one: pad it, tokenizer(…, padding=True)"
        )
    fits = ids.dim() == 2 and ids.dtype in (torch.int64, torch.int32) and ids.layout == torch.strided
    if not fits or ids.numel() == 0:
        raise ValueError(
            f"{name}: expected whole numbers of shape (batch, length), got {ids.dtype} of shape {tuple(ids.shape)}"
        )


def refuse_prompt(model: Any, ids: Any) -> None:
    """Refuse `input_ids` (B, length) that the target cannot embed."""
    refuse_ids("input_ids", ids)
    device = device_of(model)
    if device.type != "meta" and ids.device.type not in ("cpu", device.type):
        raise ValueError(f"input_ids are on {ids.device}, the target on {device}: move them with .to({str(device)!r})")
    refuse_outside("input_ids", ids, "target", tokens_known(model))


def refuse_outside(name: str, ids: torch.Tensor, whose: str, size: int) -> None:
    """Refuse tokens that a vocabulary of `size` does not have."""
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= size:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"{name}: token {outside} is outside the {whose}'s vocabulary of {size}")


def refuse_mask(ids: torch.Tensor, mask: Any, ends_in_text: bool = True, name: str = "attention_mask") -> None:
    """Refuse a mask (B, width) that is none of `ids`; with `ends_in_text` one that hides a row's last token."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor of shape (batch, length), got {type(mask).__name__}")
    if mask.is_nested:
        raise ValueError(f"{name}: expected a dense tensor of shape {tuple(ids.shape)}, got a nested one")
    if mask.device.type not in ("cpu", ids.device.type):
        raise ValueError(
            f"{name} is on {mask.device}, input_ids on {ids.device}: move it with .to({str(ids.device)!r})"
        )
    if tuple(mask.shape) != tuple(ids.shape):
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}: they must agree")
    if mask.layout != torch.strided or mask.is_complex():
        raise ValueError(f"{name}: expected a dense tensor of 0 and 1, got {mask.dtype} ({mask.layout})")
    hidden = mask == 0
    wrong = torch.stack(
        [hidden[:, -1], hidden.all(dim=1), (~hidden & (mask != 1)).any(dim=1)]
    ).cpu()  # (3, B): one look
    if bool(wrong[2].any()):
        raise ValueError(f"{name}: expected 1 for a token and 0 for one that does not count, got other numbers")
    if bool(wrong[1].any()):
        row = int(wrong[1].nonzero()[0])
        raise ValueError(f"{name} hides all of row {row}: every row needs a token")
    if ends_in_text and bool(wrong[0].any()):
        row = int(wrong[0].nonzero()[0])
        raise ValueError(f"{name} hides the last token of row {row}: pad on the left (tokenizer.padding_side='left')")
