"""Shared by several tests."""

import copy
from typing import Any

import torch

from support.tiny import NEVER_EMITTED


ORIGINAL, NEW = 24, 30  # the length at which frequencies change; every text crosses it or starts behind it


def alone(model: Any, prompt: torch.Tensor, **settings: Any) -> list[int]:
    """The new tokens that `generate` writes behind `prompt` (n,), on a model that has seen no other text."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": NEVER_EMITTED} | settings
    mask = torch.ones_like(prompt)[None]
    out = copy.deepcopy(model).generate(input_ids=prompt[None], attention_mask=mask, **settings)
    return out[0, len(prompt) :].tolist()
