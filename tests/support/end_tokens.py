"""Shared by several tests."""

import torch


def some_eos(texts: torch.Tensor, width: int) -> int:
    """A token of `texts` (B, width + new) that ends their rows at times as different as can be."""
    new = texts[:, width:]

    def ends(token: int) -> set[int]:
        return {int(hits[0]) for row in new if len(hits := (row == token).nonzero())}

    return max(set(new.flatten().tolist()), key=lambda token: len(ends(token)))
