"""Draft networks on a target's hidden states: their base class, and the model that runs one of them during a call.

A network has two functions of tensors, run as they are or inside a compiled round: `step` drafts a token, and `learn`
reads the target's states of a round. Both write to a row cache at slots that are arguments, so that a rollback is
nothing: rejected tokens are overwritten.
"""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from typing_extensions import Self

from ...models.compiled.static_cache import StaticRowCache
from ...round import Reading
from ...tensors import on_device, upload


WIDE = 64  # tokens that a step does not read, since it would keep the states of each
Memory: TypeAlias = tuple[torch.Tensor, ...]  # what a network carries from step to step, (B, …) each


class AttentionWindow(NamedTuple):
    """How far back one layer sees, as the network was trained. Within a draft nothing is hidden by `reach`.

    `speculators` trains a window that ends where a draft begins: all tokens of a draft see the same part of the text.
    DFlash files of z-lab and ModelOpt have one that moves on with each token, as Transformers' sliding windows do.

    Args:
        reach: tokens that it sees before the place from which it counts; None: all.
        moves: it counts from each token, rather than from the last token before the draft.
        causal: a token sees no later one of its block.
    """

    reach: int | None = None
    moves: bool = False
    causal: bool = False

    def seen(self, slots: torch.Tensor, begins: torch.Tensor, visible: int) -> torch.Tensor:
        """Return which of `visible` slots each token attends to, (1 or B, 1, 1 or Q, visible) bool.

        Args:
            slots (1 or B, Q): those of the tokens, in ascending order.
            begins (1 or B, 1 or Q): the slot from which each token's draft begins.
        """
        keys = torch.arange(visible, device=slots.device)
        seen = keys <= (slots if self.causal else slots[:, -1:])[..., None]
        if self.reach is not None:
            first = (slots if self.moves else begins) - self.reach
            seen = seen & ((keys >= first[..., None]) | (keys >= begins[..., None]))
        return seen[:, None]


CAUSAL = AttentionWindow(causal=True)


def masks_of(
    sights: Sequence[AttentionWindow],
    slots: torch.Tensor,
    begins: torch.Tensor,
    visible: int,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return the mask of each layer, see `AttentionWindow.seen`; with a `dtype`, additive.
    Equal layers share a mask."""
    masks: list[torch.Tensor] = []
    for layer, sight in enumerate(sights):
        if sight in sights[:layer]:
            masks.append(masks[sights.index(sight)])
            continue
        seen = sight.seen(slots, begins, visible)
        if dtype is not None:
            seen = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        masks.append(seen)
    return masks


class HiddenStateNetwork(torch.nn.Module):
    """Base class of draft networks on hidden states. `embed_tokens` and `lm_head` are None if the target's are used.

    `config` has `layer` (the Transformers config of a layer), `layers_of(blocks)` (the layers whose states are read),
    `target_hidden_size`, `draft_vocab_size`, and `reduced` (the draft has fewer tokens than the target).
    """

    config: Any
    embed_tokens: torch.nn.Embedding | None
    lm_head: torch.nn.Linear | None
    d2t: torch.Tensor  # (draft_vocab_size,) int64: draft id i is target id i + d2t[i]
    norm: torch.nn.Module | None  # before the head; None: the head reads the last layer's output
    layers: torch.nn.ModuleList
    rotary_emb: torch.nn.Module
    fc: torch.nn.Linear  # reads the target's states
    spare = 0  # cache slots that a draft takes in addition to the tokens of its text
    reads_tokens: ClassVar[bool] = True  # the text's tokens; False: only the last one, in addition to the states

    @property
    def longest(self) -> int | None:
        """The most tokens of a draft, if one forward drafts all, before any is drawn; None: any number, one by one."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, taken from the norms, since linear layers may be in int8."""
        return self.norm_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm_weight.device

    @property
    def norm_weight(self) -> torch.Tensor:
        assert self.norm is not None
        return self.norm.get_parameter("weight")

    @property
    def target_ids(self) -> torch.Tensor:
        """The target's id of each token that the head can propose, (draft_vocab_size,) int64."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def state_blocks(self) -> torch.nn.ModuleList:
        """The blocks whose states a `HiddenStateHook` keeps."""
        return self.layers

    def get_decoder(self) -> torch.nn.Module:
        """Return the module whose output the head reads."""
        return self.layers[-1] if self.norm is None else self.norm

    def step(
        self, stack: "Stack", inputs: torch.Tensor, cached: torch.Tensor, num_drafted: torch.Tensor, memory: Memory
    ) -> tuple[torch.Tensor, Memory]:
        """Draft token `num_drafted` () of a round after `inputs` (B, 1 or 2).

        `cached` (B,): tokens of each text whose states it has read, all but the last one. `memory`: from the step
        before, or `learn`. Returns logits over the network's tokens (B, draft V), and the next memory.
        """
        raise NotImplementedError

    def learn(self, stack: "Stack", reading: Reading) -> Memory:
        """Read what the target has read; return the memory of the next draft."""
        raise NotImplementedError

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Project the target's states (…, layers · target width) to the network's width, (…, H).

        Those of n pairs are a memory if it `reads_tokens`.
        """
        raise NotImplementedError

    def state_column(self, index: int) -> int:
        """Return the column, in the states of its latest forward, of the state that draft token `index` was drawn
        from."""
        return -1


class Stack(NamedTuple):
    """A network with the modules and the cache that it runs on. `step` and `learn` are those of a `DraftBlock`."""

    model: HiddenStateNetwork
    embedding: torch.nn.Module  # of the target's tokens
    head: torch.nn.Module
    ids: torch.Tensor | None  # in the target's vocabulary, if the network can propose only a part of it
    cache: StaticRowCache
    vocabulary: int  # size of the target's

    def step(
        self, inputs: torch.Tensor, cached: torch.Tensor, num_drafted: torch.Tensor, memory: Memory
    ) -> tuple[torch.Tensor, Memory]:
        """See `HiddenStateNetwork`; logits are over the target's tokens, (B, V), −inf for those it cannot propose."""
        logits, memory = self.model.step(self, inputs, cached, num_drafted, memory)
        return self.spread(logits), memory

    def learn(self, reading: Reading) -> Memory:
        """See `HiddenStateNetwork`."""
        return self.model.learn(self, reading)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Spread logits over the network's tokens (…, draft V) to the target's (…, V)."""
        if self.ids is None:
            return logits
        out = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
        out[..., self.ids] = logits
        return out


class HiddenStateModel:
    """A draft network on a row cache during one call. The network reads the target's states when it is to draft, not
    before.

    Args: see `Stack`, and
        rows: how many. limit: the most tokens of a row.
        begins: tokens of each row that the target held before, whose states are unknown; to the network the text begins
            after them.
    """

    def __init__(
        self,
        network: HiddenStateNetwork,
        embedding: torch.nn.Module,
        head: torch.nn.Module,
        rows: int,
        limit: int,
        vocabulary: int,
        begins: Sequence[int] | None = None,
    ):
        self.network, self.device, self.dtype = network, network.device, network.dtype
        self.begins = list(begins or [0] * rows)
        ids = network.target_ids.to(self.device) if network.config.reduced else None
        self.stack = Stack(network, embedding, head, ids, self._empty_cache(limit), vocabulary)
        self.known = list(self.begins)  # tokens of each row whose states the target has provided
        self.learned = list(self.begins)  # those whose states the network has read
        # States between the two, and the token of each row that they begin with.
        self._pending: list[tuple[torch.Tensor, list[int]]] = []
        self.memory: Memory | None = None
        self.number = 0  # tokens drafted since the network has read states
        self._first: torch.Tensor | None = None  # the first step's input, if it is more than the last token

    def _empty_cache(self, limit: int) -> StaticRowCache:
        cache = StaticRowCache(len(self.network.layers), limit + self.network.spare)
        cache.model = self.network
        return cache

    @property
    def behind(self) -> int:
        """The most states of a row that the network has not read yet."""
        return max((provided - learned for provided, learned in zip(self.known, self.learned, strict=True)), default=0)

    def take(self, states: torch.Tensor, ends: Sequence[int]) -> None:
        """Take the target's states (B, Q, layers · target width) of the tokens after the known ones, up to
        `ends[b]`."""
        self._pending.append((states.to(self.device), self.known))
        self.known = [max(pair) for pair in zip(ends, self.known, strict=True)]

    def read(self, tokens: torch.Tensor, drafts: bool = False) -> None:
        """Let the network read all states taken. `drafts`: the next step follows at once, and may read them.

        `tokens` (B, n): the text's from token `learned[b]` to the last one, padded on the right.
        """
        if not self._pending:
            return
        tokens, width = tokens.to(self.device), self.behind
        counts = [provided - learned for provided, learned in zip(self.known, self.learned, strict=True)]
        if self.memory is not None and not self.number and self.network.reads_tokens:
            self.step(tokens[:, :1])  # nothing was drafted from the last states: their token is not in the cache
        if drafts and self.network.reads_tokens and width < WIDE and min(counts) == width:
            self.memory, self._first = (self.network.fuse(self._states(width)),), tokens[:, 1:]
        else:
            cached = self._cached()
            upload([cached, counts], self.device)
            self.stack.cache.reserve(max(cached) + width + 1 + self.network.spare)
            starts, ends = on_device(cached, self.device), on_device(counts, self.device)
            last = tokens.gather(1, ends[:, None])
            accepted = (ends - 1).clamp(min=0)  # a row without states is not used
            self.memory = self.stack.learn(Reading(tokens[:, 1:width], starts, accepted, last, self._states(width)))
        self.learned, self._pending, self.number = list(self.known), [], 0

    def _states(self, width: int) -> torch.Tensor:
        """Return the states that the network has not read, (B, width, ·)."""
        states, _ = self._pending[0]
        if len(self._pending) > 1:
            longest = max(states.shape[1] for states, _ in self._pending)
            out = states.new_zeros(len(states), width + longest, states.shape[2])
            rows = torch.arange(len(states), device=self.device)[:, None]
            for states, begins in self._pending:  # what is not the text's is overwritten by the next
                first = [begin - learned for begin, learned in zip(begins, self.learned, strict=True)]
                columns = on_device(first, self.device)[:, None] + torch.arange(states.shape[1], device=self.device)
                out[rows, columns] = states
            states = out
        return states[:, :width]

    def step(self, last: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, V) of the token after `last` (B, 1), the text's last token or one that was drafted."""
        assert self.memory is not None, "the network has read states"
        self._last, cached = last.to(self.device), [max(n, 1) for n in self._cached()]
        inputs, self._first = self._last if self._first is None else self._first, None
        self.stack.cache.reserve(max(cached) + self.number)
        num_drafted = on_device([self.number], self.device)[0]
        logits, self.memory = self.stack.step(inputs, on_device(cached, self.device), num_drafted, self.memory)
        self.number += 1
        return logits

    def _cached(self) -> list[int]:
        return [learned - begin for learned, begin in zip(self.learned, self.begins, strict=True)]

    @property
    def state_column(self) -> int:
        """The column, in the states of the network's latest forward, of the state that the latest token was drawn
        from."""
        return self.network.state_column(self.number - 1)

    def follow(self, lengths: Sequence[int], memory: Memory) -> None:
        """Continue after a compiled round, which has read the states of `lengths` tokens of each row."""
        self.known, self.learned, self.memory, self.number = list(lengths), list(lengths), memory, 0

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        self.stack.cache.select(index)
        self.begins, self.known, self.learned = (
            [values[row] for row in rows] for values in (self.begins, self.known, self.learned)
        )
        self._pending = [(states[index], [begins[row] for row in rows]) for states, begins in self._pending]
        self.memory = None if self.memory is None else tuple(tensor[index] for tensor in self.memory)

    def fresh(self, rows: int, limit: int) -> Self:
        """Return `rows` empty rows, for texts of up to `limit` tokens."""
        out = copy.copy(self)
        out.stack = self.stack._replace(cache=self._empty_cache(limit))
        out.begins, out.known, out.learned = [0] * rows, [0] * rows, [0] * rows
        out._pending, out.memory, out.number = [], None, 0
        return out

    def insert(self, slots: Sequence[int], other: Self, rows: Sequence[int]) -> None:
        """Copy rows of `other` to the rows at `slots`, which may lie after the last existing row;
        in both all states are read."""
        count, cached = max(len(self.known), 1 + max(slots)), other._cached()
        self.stack.cache.insert(slots, other.stack.cache, rows, [cached[row] for row in rows], count)
        for values, new in ((self.begins, other.begins), (self.known, other.known), (self.learned, other.learned)):
            values += [0] * (count - len(values))
            for slot, row in zip(slots, rows, strict=True):
                values[slot] = new[row]
        if other.memory is not None:  # else its prompts are of one token
            old = self.memory or tuple(tensor[:0] for tensor in other.memory)
            self.memory = tuple(tensor.new_zeros(count, *tensor.shape[1:]) for tensor in old)
            for out, tensor, added in zip(self.memory, old, other.memory, strict=True):
                out[: len(tensor)] = tensor
                out[list(slots)] = added[list(rows)]
