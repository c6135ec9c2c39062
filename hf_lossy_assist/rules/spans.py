"""Spans of a text between two marks, such as a reasoning model's thinking."""

from collections.abc import Sequence

import torch


def within(tokens: torch.Tensor, marks: tuple[int, int], before: torch.Tensor) -> torch.Tensor:
    """Whether each place lies inside a span, and the one behind the last token, (B, n) → (B, n + 1) bool.

    A span goes from behind its first mark up to and with its second: a place is inside if the last mark before it is the first one.
    `before` (B,): whether the first place is inside.
    """
    count = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    opened, closed = (torch.where(tokens == mark, count, 0).cummax(dim=1).values for mark in marks)
    behind = torch.where(opened == closed, before[:, None], opened > closed)  # equal: no mark yet
    return torch.cat([before[:, None], behind], dim=1)


def at_end(prompts: Sequence[torch.Tensor], marks: tuple[int, int]) -> torch.Tensor:
    """Whether each row's text ends inside a span, (rows,) bool."""
    out = torch.zeros(len(prompts), dtype=torch.bool, device=prompts[0].device)
    for row, prompt in enumerate(prompts):
        out[row] = within(prompt[None], marks, out[row : row + 1])[0, -1]
    return out
