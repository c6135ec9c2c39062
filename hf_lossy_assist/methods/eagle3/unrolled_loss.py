"""Unroll drafted chains at every position of a text at once: EAGLE-3's loss and figures.

"Training-time test" (§3.2, huggingface.co/papers/2503.01840): in step k the network reads its output of step k − 1 instead of the target's state,
as it does when it drafts, and each chain attends to the target's states before its first position and to its outputs after it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import DynamicCache

from ...drafters.networks.base import HiddenStateNetwork
from ...drafters.networks.eagle_network import Eagle3Network
from .collect import TextBatch


class ChainStep(NamedTuple):
    """Step k of all chains of a batch.

    loss: scalar, the sum over positions of the cross entropy with the target's distribution. places: the number of positions. tried (B, T − 1)
    bool: positions with token k + 1 of a chain whose earlier tokens all equal the target's. right (B, T − 1) bool: those of them where this token
    equals the target's, too.
    """

    loss: torch.Tensor
    places: torch.Tensor
    tried: torch.Tensor
    right: torch.Tensor


class Wanted(NamedTuple):
    """The tokens that drafts in a batch are to predict: entry i of the tensors (B, T − 1) or (B, T − 1, k) is about token i + 2."""

    tokens: torch.Tensor  # the text's
    likely: torch.Tensor  # the likeliest tokens, by their place in the draft's vocabulary
    probs: torch.Tensor  # the target's probabilities of them, 0 for those that the draft lacks
    first: torch.Tensor  # (B, 1) the entry of each answer's first token; −1: drafts have no state to begin with
    last: torch.Tensor  # (B, 1) that of its last

    @classmethod
    def of(cls, network: HiddenStateNetwork, batch: TextBatch) -> "Wanted":
        """Return it on the network's device."""
        ids, device = batch.ids.to(network.device), network.device
        draft_ids = torch.full((network.config.layer.vocab_size,), -1, device=device)  # by target id; −1: none
        draft_ids[network.target_ids] = torch.arange(len(network.target_ids), device=device)
        index = draft_ids[batch.likely[:, 1:].to(device)]
        probs = batch.probs[:, 1:].to(device) * (index >= 0)
        first, last = batch.prompts.to(device)[:, None] - 2, batch.lengths.to(device)[:, None] - 3
        return cls(torch.nn.functional.pad(ids[:, 2:], (0, 1)), index.clamp(min=0), probs, first, last)

    @staticmethod
    def cross_entropy(logits: torch.Tensor, p: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """Return the sum over places of the cross entropy of `logits` (n, V) with probabilities `p` (n, k) of the tokens `of` (n, k)."""
        return (logits.logsumexp(dim=-1) * p.sum(dim=-1) - (p * logits.gather(-1, of)).sum(dim=-1)).sum()


def unroll(network: Eagle3Network, embedding: torch.nn.Module, batch: TextBatch, steps: int) -> Iterator[ChainStep]:
    """Draft chains of `steps` greedy tokens at every position of the answers in `batch`; yield one step at a time."""
    ids, device = batch.ids.to(network.device), network.device
    # Pair i is the embedding of token i + 1 with the states of token i; it predicts token i + 2.
    pairs = ids.shape[1] - 1
    embeds = embedding(ids[:, 1:]).detach()
    states = network.fuse(batch.states[:, :-1].to(device))  # in the network's precision, whatever the target's is
    wanted, index, probs, first, last = Wanted.of(network, batch)
    places = torch.arange(pairs, device=device)
    cache, alive = DynamicCache(), torch.ones_like(wanted, dtype=torch.bool)
    for step in range(steps):
        masks = [_make_mask(pairs, step, device, states.dtype)] * len(network.layers)
        output, normed = network(embeds, states, places[None], masks, cache)
        # The chain began in the answer, and the next token is known. The head, a third of the work, runs on those positions only.
        here = (places >= first.clamp(min=0) + step) & (places <= last)
        logits = network.lm_head(normed[here]).float()
        loss = Wanted.cross_entropy(logits, probs[here], index[here])
        right = alive & here
        right[here] &= network.target_ids[logits.argmax(dim=-1)] == wanted[here]
        yield ChainStep(loss, here.sum(), alive & here, right)
        alive = _shift(right)
        states = _shift(output)


def count_accepted(steps: Sequence[ChainStep]) -> torch.Tensor:
    """Return how many tokens of the chain beginning at each position equal the target's, (B, T − 1)."""
    out = torch.zeros_like(steps[0].right, dtype=torch.int64)
    for k, step in enumerate(steps):
        begun = step.right[:, k:]  # chains that began k positions earlier
        out[:, : begun.shape[1]] += begun
    return out


def count_calls(accepted: Sequence[int], first: int, last: int) -> int:
    """Return the number of target calls that write the tokens after positions `first` … `last`, given each position's accepted tokens.

    There is no draft before position 0.
    """
    slot, rounds = first, 0
    while slot <= last:
        slot += 1 + (accepted[slot] if slot >= 0 else 0)
        rounds += 1
    return rounds


def _shift(values: torch.Tensor) -> torch.Tensor:
    """Shift (B, T, …) by one position, with zeros at the first."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)


def _make_mask(pairs: int, step: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of step `step` over the positions of all steps so far, (1, 1, pairs, (step + 1) · pairs).

    A chain at position i began at position i − step. It attends to the target's states up to there, and to one position of each later step.
    """
    slot = torch.arange(pairs, device=device)
    back = slot[:, None] - slot[None]  # distance to an earlier place
    masks = [back >= step, *(back == step - later for later in range(1, step + 1))]
    out = torch.zeros(1, 1, pairs, (step + 1) * pairs, dtype=dtype, device=device)
    return out.masked_fill_(~torch.cat(masks, dim=1), torch.finfo(dtype).min)
