"""Shared by several tests."""

import torch

from support import tiny


RAGGED = (9, 1, 4, 14)


def greedy_equals(policy, lengths=(9,), kind="often", name="llama", **settings):
    """The output, once its greedy text is the target's own."""
    model = tiny.shared(name)
    out = tiny.assisted(model, tiny.prompts(lengths), tiny.draft_of(model, kind), policy, **settings)
    assert torch.equal(out.sequences, tiny.greedy(model, tiny.prompts(lengths), **settings)), policy
    return out.speculation
