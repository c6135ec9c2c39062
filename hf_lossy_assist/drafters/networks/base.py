"""Base classes of draft networks on a target's hidden states, and of the models that run them on a row cache."""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import Self

from ...batch.rows import Rows
from ...models.compiled.compilation import Compilation
from ...models.compiled.static_cache import BufferLease, StaticRowCache
from ...models.row_cache import RowCache
from ...uploads import on_device


class HiddenStateNetwork(torch.nn.Module):
    """Base class of draft networks on hidden states. `embed_tokens` and `lm_head` are None if the target's are used.

    `config` has `layer` (the Transformers config of a layer), `layers_of(blocks)` (the layers whose states are read), `target_hidden_size`,
    `draft_vocab_size`, and `reduced` (the draft has fewer tokens than the target).
    """

    config: Any
    embed_tokens: torch.nn.Embedding | None
    lm_head: torch.nn.Linear | None
    d2t: torch.Tensor  # (draft_vocab_size,) int64: draft id i is target id i + d2t[i]
    norm: torch.nn.Module | None  # before the head; None: the head reads the last layer's output
    layers: torch.nn.ModuleList
    rotary_emb: torch.nn.Module
    spare = 0  # cache slots that a draft takes in addition to the tokens of its text

    @property
    def why_eager(self) -> str | None:
        """Why its rounds cannot be compiled, if they cannot."""
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


def spread(logits: torch.Tensor, ids: torch.Tensor | None, vocabulary: int) -> torch.Tensor:
    """Spread logits (…, n) for tokens `ids` (n,) over a vocabulary, (…, V); other tokens get −inf. `ids` None: return `logits`."""
    if ids is None:
        return logits
    out = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
    out[..., ids] = logits
    return out


class HiddenStateModel:
    """A draft network on a row cache, with the methods of a `CachedModel`; it learns the target's hidden states from round to round.

    A subclass implements `feed`, `learn` and `rollback`, and `prepare` if it has more data.

    Args:
        network: the draft network.
        embedding: the module that embeds the target's tokens. head: the module that reads the network's output.
        rows: how many. limit: the most tokens of a row. vocabulary: size of the target's.
        begins: tokens of each row that the target held before, whose states are unknown; to the network the text begins after them.
    """

    needs_prefill = outlives_call = reads_whole = False
    reads_tokens: ClassVar[bool] = True  # every token of the text; False: only the last one, in addition to the states
    in_blocks: ClassVar[bool] = False  # it drafts a round's tokens in one forward, before any is drawn
    longest: int | None = None  # the most tokens of one draft
    wanted = 1  # of the round's
    row_lists: ClassVar[tuple[str, ...]] = ("lengths", "known", "_begins")  # attributes with an entry for each row
    row_tensors: ClassVar[tuple[str, ...]] = ()  # the same, tensors

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
        self.network, self.embedding, self.head, self.vocabulary = network, embedding, head, vocabulary
        self.device, self.dtype = network.device, network.dtype
        self.cache = RowCache(len(network.layers), limit + network.spare)
        self._begins = list(begins or [0] * rows)
        self.lengths = list(self._begins)
        self.known = list(self._begins)  # tokens of each row whose states the target has provided
        self._target_ids = network.target_ids.to(self.device) if network.config.reduced else None
        self.prepare(rows)

    def prepare(self, rows: int) -> None:
        """Set up a subclass's data, at the end of `__init__`."""

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        """Read tokens, see `CachedModel.feed`; logits of tokens that the network cannot propose are −inf."""
        raise NotImplementedError(f"{type(self).__name__} needs a method feed(tokens, counts, keep)")

    def learn(self, states: torch.Tensor, ends: Sequence[int]) -> None:
        """Take the target's states (B, Q, layers · target width) of the tokens after the known ones; row b's are valid up to token `ends[b]`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method learn(states, ends)")

    def rollback(self, lengths: Sequence[int]) -> None:
        raise NotImplementedError(f"{type(self).__name__} needs a method rollback(lengths)")

    def state_columns(self, counts: list[int]) -> torch.Tensor | int:
        """Return the column of each row's last real token in the states of the latest forward, which read `counts` tokens."""
        return -1 if len(set(counts)) == 1 else on_device(counts, self.device) - 1

    def over_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Spread logits over the network's tokens (…, draft V) to the target's (…, V)."""
        return spread(logits, self._target_ids, self.vocabulary)

    def confidence(self) -> torch.Tensor:
        """Return the network's estimate that the target accepts a token of the latest position, (B, 1) float32, if it `gives_confidence`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method confidence()")

    # For compiled rounds, whose graphs write to the same cache.

    def have_static_cache(self, compilation: Compilation) -> None:
        """Switch to storage of fixed sizes, for rounds compiled with `compilation`; before anything is fed."""
        self.cache = StaticRowCache(len(self.network.layers), self.cache.limit)
        if compilation.replays({self.device}):
            self.cache.lease = BufferLease(self.network, len(self.network.layers))

    def allocate(self, tokens: int) -> None:
        """Allocate storage for `tokens` of each row, unless there is some."""
        layer, heads = self.network.config.layer, self.network.config.layer.num_key_value_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        if not self.cache.layers[0].is_initialized:
            like = torch.zeros(1, heads, 1, size, dtype=self.dtype, device=self.device)
            self.static_cache.allocate([(like, like)] * len(self.cache.layers), len(self.lengths), tokens)

    @property
    def static_cache(self) -> StaticRowCache:
        assert isinstance(self.cache, StaticRowCache), "compiled rounds have one"
        return self.cache

    @property
    def traced(self) -> Any:
        """The parts of this model that are passed to a compiled round, a `DraftBlock`."""
        raise NotImplementedError(f"{type(self).__name__} needs a property traced")

    @property
    def remembered(self) -> int:
        """The number of states in that memory."""
        return self.longest or 1

    def memory(self, rows: Rows) -> torch.Tensor:
        """Return the memory that a compiled round's draft begins with, for texts whose states are all known."""
        raise NotImplementedError(f"{type(self).__name__} needs a method memory(rows)")

    def follow(self, lengths: Sequence[int], memory: torch.Tensor) -> None:
        """Continue after a compiled round, after which `lengths` tokens of each row are known. `memory`: for the next round."""
        raise NotImplementedError(f"{type(self).__name__} needs a method follow(lengths, memory)")

    def mark(self) -> dict[str, object]:
        """Return a snapshot for `back_to`."""
        return {name: list(value) if isinstance(value, list) else value for name, value in vars(self).items()}

    def back_to(self, mark: dict[str, object]) -> None:
        """Drop what was fed since `mark`, between two calls of `learn`."""
        vars(self).update(mark)

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        self.cache.select(index)
        for name in self.row_tensors:
            setattr(self, name, getattr(self, name)[index])
        for name in self.row_lists:
            setattr(self, name, [getattr(self, name)[row] for row in rows])

    def fresh(self, rows: int, limit: int) -> Self:
        """Return `rows` empty rows, for texts of up to `limit` tokens."""
        out = copy.copy(self)
        out.cache = self.cache.like(limit + self.network.spare)
        out._begins, out.lengths, out.known = [0] * rows, [0] * rows, [0] * rows
        out.prepare(rows)
        return out

    def insert(self, places: Sequence[int], other: Self, rows: Sequence[int]) -> None:
        """Copy rows of `other` to the rows at `places`, which may lie after the last existing row."""
        count, held = max(len(self.lengths), 1 + max(places)), other.cached_tokens()
        self.cache.insert(places, other.cache, rows, [held[row] for row in rows], count)
        for name in self.row_lists:
            values, new = getattr(self, name), getattr(other, name)
            values += [0] * (count - len(values))
            for place, row in zip(places, rows, strict=True):
                values[place] = new[row]
        for name in self.row_tensors:
            old, new = getattr(self, name), getattr(other, name)
            out = old.new_zeros(count, *map(max, old.shape[1:], new.shape[1:]))
            out[tuple(map(slice, old.shape))] = old
            index: tuple[list[int] | slice, ...] = (list(places), *map(slice, new.shape[1:]))
            out[index] = new[list(rows)]
            setattr(self, name, out)

    def cached_tokens(self) -> list[int]:
        """Return the number of each row's cache entries."""
        return [known - begin for known, begin in zip(self.known, self._begins, strict=True)]

    def export(self, rows: int, mask: object) -> None:
        """Return None: Transformers could not continue from this cache."""
