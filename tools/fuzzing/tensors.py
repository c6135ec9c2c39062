"""Tensors for `generate` with a policy: prompts and masks of wrong type, shape, device and content."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from .models import FAMILIES, VOCAB, checked, prompts, short
from .values import Random, junk, shown
from .verdicts import Case


TYPES = [
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.complex64,
]
NAMES = (
    "input_ids",
    "attention_mask",
    "inputs",
    "decoder_input_ids",
    "decoder_attention_mask",
    "token_type_ids",
    "position_ids",
)


def changed(random: Random, given: torch.Tensor, mask: bool) -> Any:
    """Return `given` with one property changed."""
    how, given = random.randrange(14), given.detach()
    rows, width = given.shape
    if how == 0:
        return given.to(random.choice(TYPES))
    if how == 1:
        return given.to("meta")
    if how == 2:
        return random.choice(
            [given[0], given[None], given[..., None], given[:0], given[:, :0], given.T, given[0, 0], given[:, 1:]]
        )
    if how == 3:
        return torch.cat([given, given], dim=random.randrange(2))
    if how == 4:
        return random.choice(
            [given.tolist(), given.numpy(), np.asarray(given, dtype=float), [given], {"ids": given}, given.to_sparse()]
        )
    if how == 5:
        return given.expand(rows, width).as_strided((rows, width), (0, 1))  # all rows in one place
    if how == 6:
        return junk(random)()
    if how == 7:
        return torch.nn.Parameter(given.double())
    out = given.clone()
    for _ in range(random.choice([1, 1, 3])):
        place = random.randrange(rows), random.randrange(width)
        wrong = [0, 0, 0, 1, 2, -1, 255, -(10**9)] if mask else [VOCAB, VOCAB + 5, -1, -100, 2**40, 0, 3, -(2**63)]
        out[place] = random.choice(wrong)
    return out


def case(random: Random, folder: Path) -> Case:
    family = random.choices(FAMILIES, (6, 2, 2))[0]
    given: dict[str, Any] = dict(prompts(random, random.choice([1, 2, 3]) if family != "t5" else 1))
    names = random.choices(NAMES, (8, 12, 2, 1, 1, 1, 1), k=random.choice([1, 1, 2]))
    right = dict(given)
    for name in names:
        given[name] = changed(random, right["attention_mask" if "mask" in name else "input_ids"], "mask" in name)
    if random.random() < 0.1:
        given.pop(random.choice(["input_ids", "attention_mask"]), None)
    more = {"do_sample": True, "top_k": 1} if random.random() < 0.1 else {}
    what = f"{family}: " + ", ".join(f"{name}={_described(value)}" for name, value in given.items())

    def build() -> dict[str, Any]:
        return given | {"max_new_tokens": 8, "do_sample": False, "stopping_criteria": short()} | more

    return Case(what, lambda: checked(family, build))


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() < 40 and not value.is_sparse:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    return (
        f"{value.dtype} of {tuple(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else shown(value)
    )
