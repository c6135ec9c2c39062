"""Unroll drafts at every position of a text at once: the losses and figures of EAGLE-3's chains and of DSpark's blocks.

EAGLE-3's "training-time test" (§3.2, huggingface.co/papers/2503.01840): in step k the network reads its output of step k − 1 instead of the target's state,
as it does when it drafts, and each chain attends to the target's states before its first position and to its outputs after it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from transformers import DynamicCache

from ...drafters.networks.base import HiddenStateNetwork
from ...drafters.networks.corrected_networks import DSparkNetwork
from ...drafters.networks.eagle_network import Eagle3Network
from ...models.row_cache import RowCache
from .collect import TextBatch


BLOCKS = 128  # blocks of a forward: each of their tokens attends to the text, and the mask is as wide as all of them


class ChainStep(NamedTuple):
    """Step k of all chains of a batch.

    loss: scalar, the sum over positions of the cross entropy with the target's distribution. positions: their number. tried (B, T − 1)
    bool: positions with token k + 1 of a chain whose earlier tokens all equal the target's. right (B, T − 1) bool: those of them where this token
    equals the target's, too.
    """

    loss: torch.Tensor
    positions: torch.Tensor
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
    positions = torch.arange(pairs, device=device)
    cache, alive = DynamicCache(), torch.ones_like(wanted, dtype=torch.bool)
    answers = min(int(first.clamp(min=0).min()), pairs - 1)
    begin = 0  # of later steps `answers`: no chain begins in a prompt
    for step in range(steps):
        masks = [_make_mask(pairs, step, begin, device, states.dtype)] * len(network.layers)
        output, normed = network(embeds[:, begin:], states, positions[None, begin:], masks, cache)
        # The chain began in the answer, and the next token is known. The head, a third of the work, runs on those positions only.
        here = (positions >= first.clamp(min=0) + step) & (positions <= last)
        logits = network.lm_head(normed[here[:, begin:]]).float()
        loss = Wanted.cross_entropy(logits, probs[here], index[here])
        right = alive & here
        right[here] &= network.target_ids[logits.argmax(dim=-1)] == wanted[here]
        yield ChainStep(loss, here.sum(), alive & here, right)
        alive = _shift(right)
        states, begin = _shift(output)[:, answers - begin :], answers


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


def _make_mask(pairs: int, step: int, begin: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of step `step` over the positions of all steps so far, (1, 1, pairs − begin, pairs + step · (pairs − begin)).

    Steps after the first have the positions from `begin` on. A chain at position i began at position i − step. It attends to the target's states up to there, and to one position of each later step.
    """
    slot = torch.arange(pairs, device=device)
    back = slot[:, None] - slot[None]  # distance to an earlier place
    masks = [back >= step, *((back == step - later)[:, begin:] for later in range(1, step + 1))]
    seen = torch.cat(masks, dim=1)[begin:]
    return torch.zeros(1, 1, *seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)


class TextAndBlocks:
    """Takes the place of the network's cache: keys and values of a text's states, to which each layer appends the blocks'."""

    def __init__(self, network: DSparkNetwork, states: torch.Tensor):
        """Take `states` (B, T, layers · H) of all tokens."""
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        slots = torch.arange(states.shape[1], device=states.device)[None]
        self.read = False
        network.remember(states, slots, cast(RowCache, self))
        self.read = True

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the text's keys and values (B, heads, T, d) with these; the first call of each layer stores them."""
        if not self.read:
            self._held[layer] = keys, values
            return keys, values
        text_keys, text_values = self._held[layer]
        return torch.cat([text_keys, keys], dim=2), torch.cat([text_values, values], dim=2)


def unroll_blocks(
    network: DSparkNetwork, embedding: torch.nn.Module, batch: TextBatch, steps: int
) -> Iterator[ChainStep]:
    """Draft `steps` tokens after every position of the answers in `batch`, at most a block; yield one step of the blocks at a time.

    As in EAGLE-3's chains, block i begins after token i + 1 with the states of the tokens before it, and its place k predicts token i + k + 2.
    """
    assert network.lm_head is not None, "made with one"
    wanted, ids = Wanted.of(network, batch), batch.ids.to(network.device)
    pairs = ids.shape[1] - 1
    context = TextAndBlocks(network, batch.states[:, :-1].to(network.device))
    losses, counts = [ids.new_zeros((), dtype=torch.float32) for _ in range(steps)], [0] * steps
    tried = [torch.zeros_like(wanted.tokens, dtype=torch.bool) for _ in range(steps)]
    right = [torch.zeros_like(block) for block in tried]
    first, last = int(wanted.first.min().clamp(min=0)), int(wanted.last.max())
    for start in range(first, last + 1, BLOCKS):
        blocks = torch.arange(start, min(start + BLOCKS, last + 1), device=ids.device)
        hidden = _fill_blocks(network, embedding, ids, blocks, context, pairs)
        alive, state = (
            torch.ones_like(ids[:, blocks], dtype=torch.bool),
            network.first_state(ids.shape[0] * len(blocks)),
        )
        for step in range(steps):
            at = (blocks + step).clamp(max=pairs - 1)  # the pair after whose second token the place stands
            here = (blocks >= wanted.first.clamp(min=0)) & (blocks + step <= wanted.last)  # (B, blocks)
            before, read = ids[:, 1:][:, at].flatten(), hidden[:, :, step].flatten(0, 1)
            logits, state = network.correct(network.lm_head(read), read, before, state)
            logits, flat = logits.float(), here.flatten()
            p, of = wanted.probs[:, at].flatten(0, 1)[flat], wanted.likely[:, at].flatten(0, 1)[flat]
            losses[step] = losses[step] + Wanted.cross_entropy(logits[flat], p, of)
            counts[step] += int(here.sum())
            hit = (network.target_ids[logits.argmax(dim=-1)].view_as(here) == wanted.tokens[:, at]) & here & alive
            tried[step][:, at[here.any(dim=0)]] = (alive & here)[:, here.any(dim=0)]
            right[step][:, at[here.any(dim=0)]] = hit[:, here.any(dim=0)]
            alive = hit
    for step in range(steps):
        yield ChainStep(losses[step], torch.tensor(counts[step], device=ids.device), tried[step], right[step])


def _fill_blocks(
    network: DSparkNetwork,
    embedding: torch.nn.Module,
    ids: torch.Tensor,
    blocks: torch.Tensor,
    context: TextAndBlocks,
    pairs: int,
) -> torch.Tensor:
    """Return what the head reads of the blocks numbered `blocks` (n,), (B, n, drafts, H)."""
    config, count, device = network.config, len(blocks), ids.device
    tokens = ids.new_full((len(ids), count, config.block), config.mask)
    tokens[..., 0] = ids[:, 1:][:, blocks]
    slots = (blocks + 1)[:, None] + torch.arange(config.block, device=device)
    of = torch.arange(count, device=device).repeat_interleave(config.block)  # the block of each query
    text = torch.arange(pairs, device=device) <= blocks[of][:, None]
    mask = torch.cat([text, of[:, None] == of[None]], dim=1)[None, None]
    out = embedding(tokens.flatten(1)).detach().to(network.dtype)
    cos, sin = network.rotary_emb(out, slots.flatten()[None])
    for layer in network.layers:
        out = layer(out, cos, sin, mask, context)
    return network.norm(out).unflatten(1, (count, config.block))[:, :, config.first :]
