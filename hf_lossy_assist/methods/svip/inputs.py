"""What calibrating is given, made ready: prompts as ids; settings, models and prompts that cannot work are refused."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ...drafters.hidden_state import HiddenStateDrafter
from ...models.introspection import base_of, vocabulary_of
from ...validation import MOST_FACTOR, check_number


def check_settings(thresholds: Sequence[float], **values: float | None) -> None:
    """Refuse a threshold or another number that no calibration can have; None stands for a default."""
    for h in thresholds:
        check_number("thresholds", h, 0.0, math.inf)
    for name, value in values.items():
        high = 1.0 if name == "coverage" else MOST_FACTOR
        if value is not None:
            check_number(name, value, 0.0, high)
            if value in (0.0, high):
                raise ValueError(f"{name}: expected a number above 0 and below {high:g}, got {value}")


def read_prompts(target: Any, draft: Any, prompts: Any, tokenizer: Any) -> list[torch.Tensor]:
    """Check models and prompts; the prompts as ids (L,) on the CPU."""
    known = _shared_vocabulary(target, draft)
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: expected a list of id tensors or texts, got {type(prompts).__name__}")
    rows = [_ids(f"prompts[{i}]", prompt, tokenizer, known) for i, prompt in enumerate(prompts)]
    if isinstance(draft, HiddenStateDrafter) and (short := [i for i, row in enumerate(rows) if len(row) < 2]):
        raise ValueError(
            f"prompts[{short[0]}]: {draft.kind} drafts behind two tokens or more, and this prompt has one: leave it out"
        )
    if not rows:
        raise ValueError("prompts: expected at least one, got none")
    return rows


def _shared_vocabulary(target: Any, draft: Any) -> int:
    """How many token ids both models have; refuses models that cannot be calibrated."""
    models = [("target", target), ("draft", draft)]
    if isinstance(draft, HiddenStateDrafter):
        if not draft.drafts_each_place:
            raise ValueError(
                f"draft: {draft.kind} fills in a block for each token: calibrate with an EAGLE drafter or a draft model"
            )
        draft.check(target)
        models = models[:1]
    for name, model in models:
        if not isinstance(base_of(model), PreTrainedModel):
            raise TypeError(f"{name}: expected a loaded Transformers model, got {type(model).__name__}")
        if base_of(model).config.is_encoder_decoder:
            raise ValueError(f"{name}: expected a decoder-only model, got the encoder-decoder {type(model).__name__}")
    sizes = [vocabulary_of(model) for _, model in models]
    if abs(sizes[0] - sizes[-1]) > 0.02 * max(sizes):  # the rule of `lossy_policy=`: more than padding differs
        raise ValueError(f"the target has {sizes[0]} token ids, the draft {sizes[-1]}: they need one tokenizer")
    return min(sizes)


def _ids(name: str, prompt: Any, tokenizer: Any, known: int) -> torch.Tensor:
    """A prompt's ids (L,), all below `known`."""
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
