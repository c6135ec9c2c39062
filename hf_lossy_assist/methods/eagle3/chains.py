"""Drafted chains at every place of a text at once: what EAGLE-3 is trained on and measured by.

"Training-time test" (§3.2, huggingface.co/papers/2503.01840): in step k the network reads its own output of step k − 1 in place of the target's
state, as it will when it drafts, and each chain sees the target's states before its first place and its own behind it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import DynamicCache

from ...drafters.networks.eagle_network import Eagle3Network
from .data import Batch


class Step(NamedTuple):
    """Step k of all chains of a batch.

    loss: scalar, the sum over the places of the cross entropy with the target's distribution. places: how many there are.
    tried (B, T − 1) bool: places with token k + 1 of a chain whose tokens before were all the target's. right (B, T − 1) bool: of them, those
    whose token is the target's, too.
    """

    loss: torch.Tensor
    places: torch.Tensor
    tried: torch.Tensor
    right: torch.Tensor


def steps_of(network: Eagle3Network, embedding: torch.nn.Module, batch: Batch, steps: int) -> Iterator[Step]:
    """Chains of `steps` greedily drafted tokens at every place of the answers of `batch`, a step at a time."""
    ids, device = batch.ids.to(network.device), network.device
    # Pair i is the embedding of token i + 1 with the states of token i; it predicts token i + 2.
    pairs = ids.shape[1] - 1
    embeds = embedding(ids[:, 1:]).detach()
    states = network.fuse(batch.states[:, :-1].to(device))  # in the network's precision, whatever the target's is
    draft_of = draft_ids(network)
    index = draft_of[batch.likely[:, 1:].to(device)]  # (B, pairs, k), −1: the network cannot propose it
    probs = batch.probs[:, 1:].to(device) * (index >= 0)
    places = torch.arange(pairs, device=device)
    first, last = batch.prompts.to(device)[:, None] - 2, batch.lengths.to(device)[:, None] - 3
    wanted = torch.nn.functional.pad(ids[:, 2:], (0, 1))  # the text's own next token
    cache, alive = DynamicCache(), torch.ones_like(wanted, dtype=torch.bool)
    for step in range(steps):
        mask = seen(pairs, step, device, states.dtype)
        own, normed = network(embeds, states, places[None], mask, cache)
        # The chain began in the answer, and the next token is known. The head, a third of the work, is for those places alone.
        here = (places >= first.clamp(min=0) + step) & (places <= last)
        logits, p, of = network.lm_head(normed[here]).float(), probs[here], index[here].clamp(min=0)
        loss = (logits.logsumexp(dim=-1) * p.sum(dim=-1) - (p * logits.gather(-1, of)).sum(dim=-1)).sum()
        right = alive & here
        right[here] &= network.target_ids[logits.argmax(dim=-1)] == wanted[here]
        yield Step(loss, here.sum(), alive & here, right)
        alive = shifted(right)
        states = shifted(own)


def accepted_by(steps: Sequence[Step]) -> torch.Tensor:
    """How many tokens of the chain that begins at each place are the target's, (B, T − 1)."""
    out = torch.zeros_like(steps[0].right, dtype=torch.int64)
    for k, step in enumerate(steps):
        begun = step.right[:, k:]  # a chain that began k places before
        out[:, : begun.shape[1]] += begun
    return out


def rounds_of(accepted: Sequence[int], first: int, last: int) -> int:
    """Calls of the target that write the tokens behind places `first` … `last` where each place's draft has so many right; before place 0 there is none."""
    place, rounds = first, 0
    while place <= last:
        place += 1 + (accepted[place] if place >= 0 else 0)
        rounds += 1
    return rounds


def draft_ids(network: Eagle3Network) -> torch.Tensor:
    """The draft's id of each of the target's tokens, (V,); −1: none."""
    out = torch.full((network.config.layer.vocab_size,), -1, device=network.d2t.device)
    out[network.target_ids] = torch.arange(len(network.target_ids), device=out.device)
    return out


def shifted(values: torch.Tensor) -> torch.Tensor:
    """What place i − 1 has, at place i of (B, T, …); zeros at the first."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)


def seen(pairs: int, step: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What each place of step `step` sees of the places of this step and those before, (1, 1, pairs, (step + 1) · pairs), additive.

    A chain that is at place i began at place i − step. It sees the target's states up to there, and one place of its own in each step behind.
    """
    place = torch.arange(pairs, device=device)
    back = place[:, None] - place[None]  # how far behind place i a place is
    parts = [back >= step, *(back == step - later for later in range(1, step + 1))]
    out = torch.zeros(1, 1, pairs, (step + 1) * pairs, dtype=dtype, device=device)
    return out.masked_fill_(~torch.cat(parts, dim=1), torch.finfo(dtype).min)
