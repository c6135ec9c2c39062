"""Fit a DSpark drafter to its target's texts, with EAGLE-3's data, training and figures (huggingface.co/papers/2607.05147).

A block is drafted after every position of a text at once, every place after the text's tokens. Its loss is the cross entropy with the target's
distribution p, and that of the confidence head with the rate at which strict acceptance takes a token drawn from q: Σ min(p, q), over the tokens whose
p was collected. The network begins with the target's head and the states of the last layer that it reads, as EAGLE-3's does.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel, Qwen3Config

from ...drafters.networks.corrected_networks import DSparkConfig, DSparkNetwork
from ...drafters.trained import DSparkDrafter
from ...models.row_cache import RowCache
from ..drafter_settings import DSparkFitSettings
from .collect import TextBatch, TextDataset
from .fit import Drafter, DrafterReport, Training, fit_drafter
from .initialise import count_tokens, find_most_frequent, layer_sizes, start_as_target
from .unrolled_loss import ChainStep, Wanted


BLOCKS = 128  # blocks of a forward: each of their tokens attends to the text, and the mask is as wide as all of them


DEFAULTS = DSparkFitSettings()


def make_network(target: PreTrainedModel, texts: TextDataset, settings: DSparkFitSettings) -> DSparkNetwork:
    """Create an untrained network. Blocks are filled with the token that the texts have least often, if possible never."""
    sizes = layer_sizes(target, settings)
    tokens = find_most_frequent(texts, sizes["vocab_size"], settings.vocabulary)
    counts = count_tokens(texts, sizes["vocab_size"], answers=False)
    mask = int((counts == counts.min()).nonzero().max())
    width = target.config.get_text_config(decoder=True).hidden_size
    config = DSparkConfig(
        Qwen3Config(**sizes),
        texts.layers,
        settings.steps,
        mask,
        width,
        from_anchor=True,
        draft_vocab_size=len(tokens),
        rank=settings.rank,
        markov=settings.markov,
    )
    return start_as_target(lambda: DSparkNetwork(config), target, tokens, settings.seed)


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
    """Draft `steps` tokens after every position of the answers in `batch`, at most a block; yield one place of the blocks at a time.

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
            chosen = logits[flat]
            losses[step] = losses[step] + Wanted.cross_entropy(chosen, p, of)
            if network.config.confidence:
                q = chosen.detach().softmax(dim=-1).gather(-1, of)
                sure = network.confidence(read, before)[flat, 0]
                overlap = torch.minimum(p, q).sum(dim=-1).clamp(max=1.0)
                losses[step] = losses[step] + torch.nn.functional.binary_cross_entropy(sure, overlap, reduction="sum")
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


DSPARK = Training("DSpark", "2607.05147", make_network, unroll_blocks, DSparkDrafter)


def fit_dspark(
    target: PreTrainedModel,
    data: str | Path,
    out: str | Path,
    settings: DSparkFitSettings = DEFAULTS,
    *,
    resume: bool = False,
) -> tuple[Drafter, DrafterReport | None]:
    """Train a DSpark drafter on the data of EAGLE-3's `collect`; see `fit_drafter`."""
    return fit_drafter(DSPARK, target, data, out, settings, resume)
