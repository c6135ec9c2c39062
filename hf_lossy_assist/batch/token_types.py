"""`token_type_ids` for models, as in `generate`: a new token has the type of the prompt's last token."""

import torch
from transformers import PreTrainedModel

from ..models.introspection import base_of, device_of, remember
from .rows import Rows


NAME = "token_type_ids"


def types_for(
    model: PreTrainedModel, rows: Rows, given: torch.Tensor | None, input_ids: torch.Tensor
) -> torch.Tensor | None:
    """Return the types of each row's text, (B, longest prompt) int64 without masked tokens; shorter rows repeat their last type.

    None if the model reads none. Raises: `ValueError` or `TypeError`, one line, for types that do not fit the prompts, and for a model
    whose types make attention bidirectional (between an image's tokens, for example), which cached rounds cannot reproduce.
    """
    if given is None:
        return None
    check_types(model, given, input_ids)
    if not _reach_later_forwards(model, given[:1]):
        return None
    given = given.to(input_ids.device)
    ends = [types[-1:].expand(pad) for types, pad in zip(given, rows.pads, strict=True)]
    texts = rows.visible(given)
    return torch.stack([torch.cat(pair) for pair in zip(texts, ends, strict=True)])


def check_types(model: PreTrainedModel, given: object, input_ids: torch.Tensor) -> None:
    """Raise `ValueError` or `TypeError` for types that do not fit the prompts, or that make this model's attention bidirectional."""
    base = base_of(model)
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{NAME}: expected a tensor of shape (batch, length), got {type(given).__name__}")
    if given.shape != input_ids.shape:
        raise ValueError(f"{NAME} has shape {tuple(given.shape)}, input_ids {tuple(input_ids.shape)}: they must agree")
    if given.device.type not in ("cpu", input_ids.device.type):  # "meta" has no values
        raise ValueError(
            f"{NAME} are on {given.device}, input_ids on {input_ids.device}: move them with .to({str(input_ids.device)!r})"
        )
    values = tuple(given.unique().tolist())
    count = getattr(base.config, "type_vocab_size", None) or base.get_input_embeddings().weight.shape[0]
    if values[0] < 0 or values[-1] >= count:
        outside = values[0] if values[0] < 0 else values[-1]
        raise ValueError(f"{NAME}: type {outside} is none of the model's {count}")
    reason = remember(base, (NAME, values[:2]), lambda: _trial(base, values[0], values[-1]))
    if reason is not None:
        raise ValueError(
            f"{NAME}: {reason}, which {type(base).__name__} cannot do token by token: leave {NAME} or lossy_policy out"
        )


def shared_types(model: PreTrainedModel, target: PreTrainedModel, types: torch.Tensor | None) -> torch.Tensor | None:
    """Return the target's types for a draft or companion of the same model type and number of types; they improve its guesses."""
    known, wanted = base_of(target).config, base_of(model).config
    same = all(getattr(known, name, None) == getattr(wanted, name, None) for name in ("model_type", "type_vocab_size"))
    return types if same else None


def _reach_later_forwards(model: PreTrainedModel, given: torch.Tensor) -> bool:
    """Return whether `generate` passes types on after the prompt. CTRL makes new ones; vision models need none for text."""
    inputs = base_of(model).prepare_inputs_for_generation(
        torch.zeros_like(given), is_first_iteration=False, use_cache=True, token_type_ids=given
    )
    return inputs.get(NAME) is not None


@torch.no_grad()
def _trial(base: PreTrainedModel, first: int, last: int) -> str | None:
    """Return None if a token's logits do not depend on the tokens after it, with types `first` and `last` mixed; else the reason."""
    device = device_of(base)
    ids = torch.arange(1, 9, device=device)[None] % base.get_input_embeddings().weight.shape[0]
    types = torch.tensor([[first, last, last, first, last, last, first, last]], device=device)
    whole, part = (
        base(input_ids=ids[:, :n], token_type_ids=types[:, :n], use_cache=False).logits[0, :5].float() for n in (8, 5)
    )
    tolerance = 1e-3 if base.dtype in (torch.float32, torch.float64) else 0.03
    if torch.allclose(whole, part, rtol=0, atol=tolerance * float(part.abs().max())):
        return None
    return "they let tokens see what comes behind them"
