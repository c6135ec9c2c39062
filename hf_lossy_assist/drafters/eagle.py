"""EAGLE: one or more decoder layers on the target's hidden states that draft token by token (EAGLE-3: huggingface.co/papers/2503.01840)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from ..batch.rows import Rows
from ..models.introspection import vocabulary_of
from ..uploads import advance, on_device, upload
from .compiled_networks import EagleBlock, ParallelEagleBlock
from .hidden_state import HiddenStateDrafter
from .networks.base import HiddenStateModel
from .networks.eagle_network import Eagle3Network
from .networks.sight import masks_of


PLACES = 5  # data for heads, judges and SVIP's threshold cover the first to the fifth token of a draft equally


class EagleModel(HiddenStateModel):
    """`Eagle3Network` on a row cache; it is fed tokens and finds the states that belong to them.

    Pair i is token i + 1 with the state of token i, so the first token of a text has no pair and `lengths` begin at 1. States come from the target
    up to where it has read (`learn`), else from the network's output at the previous pair; pairs of the second kind are dropped in the next
    `rollback`, and fed again with the target's states.
    """

    network: Eagle3Network
    row_lists = (*HiddenStateModel.row_lists, "_sound", "_base")
    row_tensors = ("_states", "_output")

    def prepare(self, rows: int) -> None:
        self.lengths = [begin + 1 for begin in self._begins]
        self._sound = list(self.lengths)  # how many of `lengths` rest on the target's states only
        self._base = list(self._begins)  # the token whose state is the first in `_states`
        self._states = torch.empty(
            rows, 0, self.network.config.layer.hidden_size, dtype=self.dtype, device=self.device
        )
        self._output = self._states.new_zeros(rows, self._states.shape[2])  # of the network, at each row's last pair

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        tokens, width = tokens.to(self.device), tokens.shape[1]
        starts = [length - 1 for length in self.lengths]
        output, normed = self._run(tokens, self._states_at(starts, width))
        last = on_device(counts, self.device).clamp(min=1) - 1
        self._output = output[torch.arange(len(counts), device=self.device), last]
        self._advance(starts, counts)
        return self.over_target(self.head(normed[:, width - (width if keep is None else keep) :]))

    def _run(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run pairs of `tokens` (B, Q) and fused `states` (B, Q, H) after each row's last one; return the network's outputs, (B, Q, H) each."""
        slots = self.cache.plan(self.cached_tokens(), tokens.shape[1], self.device)
        sights, masks = self.network.sights, list[torch.Tensor | None]([None] * len(self.network.layers))
        windows = any(sight.reach is not None for sight in sights)
        if tokens.shape[1] > 1 or len(set(self.lengths)) > 1 or windows:
            begins = slots
            if windows:  # a draft begins at the last pair with a state of the target's
                last_known = [known - 1 - begin for known, begin in zip(self.known, self._begins, strict=True)]
                begins = torch.minimum(slots, on_device(last_known, self.device)[:, None])
            masks = [*masks_of(sights, slots, begins, self.cache.visible, self.dtype)]
        found: tuple[torch.Tensor, torch.Tensor] = self.network(
            self.embedding(tokens), states, slots, masks, self.cache
        )
        return found

    def _advance(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Note that row b has read `counts[b]` pairs from `starts[b]` on."""
        for places in (self.cached_tokens(), self._columns(starts)):  # for the next feed
            advance(places, counts, self.device)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if start + count <= self.known[b]:
                self._sound[b] = start + count + 1
            self.lengths[b] += count

    def _states_at(self, starts: Sequence[int], width: int) -> torch.Tensor:
        """Return the states of tokens starts[b] … starts[b] + width − 1, (B, width, H); the network's output where the target's are unknown."""
        if not self._states.shape[1]:
            return self._output[:, None].expand(-1, width, -1)
        columns, unknown = self._columns(starts), [s >= known for s, known in zip(starts, self.known, strict=True)]
        upload([columns, unknown], self.device)
        first = on_device(columns, self.device)[:, None]
        given = _gather(self._states, first + torch.arange(width, device=self.device))
        return torch.where(on_device(unknown, self.device).bool()[:, None, None], self._output[:, None], given)

    def _columns(self, tokens: Sequence[int]) -> list[int]:
        """Return the column in `_states` of each row's token number `tokens[b]`."""
        return [token - base for token, base in zip(tokens, self._base, strict=True)]

    def learn(self, states: torch.Tensor, ends: Sequence[int]) -> None:
        fused = self.network.fuse(states.to(self.device))
        base = [min(sound - 1, known) for sound, known in zip(self._sound, self.known, strict=True)]
        width = max(end - start for end, start in zip(ends, base, strict=True))
        new_base, old_base, known = torch.tensor([base, self._base, self.known], device=self.device)[..., None]
        places = torch.arange(max(width, 0), device=self.device) + new_base
        out = _gather(fused, places - known)
        if self._states.shape[1]:
            out = torch.where((places < known)[..., None], _gather(self._states, places - old_base), out)
        self._states, self._base = out, base
        self.known = [max(pair) for pair in zip(ends, self.known, strict=True)]

    @property
    def traced(self) -> EagleBlock | ParallelEagleBlock:
        return self.block

    @property
    def block(self) -> EagleBlock:
        """The network in a compiled round."""
        return EagleBlock(
            self.network, self.embedding, self.head, self._target_ids, self.static_cache, self.vocabulary
        )

    def memory(self, rows: Rows) -> torch.Tensor:
        tokens, counts = rows.uncached_tokens(self.lengths)
        if max(counts) > 1:
            self.feed(tokens[:, :-1], [max(count - 1, 0) for count in counts], keep=0)
        if self._base != [length - 1 for length in self.lengths]:
            self.follow(self.lengths, self._states_at([length - 1 for length in self.lengths], 1))
        return self._states

    def follow(self, lengths: Sequence[int], memory: torch.Tensor) -> None:
        """See `HiddenStateModel`: all pairs before the last token's rest on the target's states, and `memory` (B, 1, H) is the state for that one."""
        self.lengths, self.known, self._sound = list(lengths), list(lengths), list(lengths)
        self._states, self._base = memory, [length - 1 for length in lengths]

    def cached_tokens(self) -> list[int]:
        return [length - 1 - begin for length, begin in zip(self.lengths, self._begins, strict=True)]

    def rollback(self, lengths: Sequence[int]) -> None:
        """Roll back to `lengths` cached tokens of each row, or to the end of the target's states if that is earlier."""
        self.lengths = [min(pair) for pair in zip(lengths, self._sound, strict=True)]
        self._sound = list(self.lengths)


def _gather(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return columns (B, n) of `states` (B, T, H), (B, n, H); indices are clamped."""
    return states.gather(1, columns.clamp(0, states.shape[1] - 1)[..., None].expand(-1, -1, states.shape[2]))


@dataclass(frozen=True, eq=False)
class Eagle3Drafter(HiddenStateDrafter):
    """A trained network of EAGLE-3. It drafts chains only, no trees.

    Args: see `HiddenStateDrafter`.
    """

    network: Eagle3Network
    kind: ClassVar[str] = "an EAGLE-3 drafter"
    model_type: ClassVar[str] = "eagle3"
    networks: ClassVar[tuple[type, ...]] = (Eagle3Network,)
    model_class: ClassVar[type[HiddenStateModel]] = EagleModel
    drafts_each_place: ClassVar[bool] = True

    def check_tokens(self, base: PreTrainedModel) -> None:
        config, size = self.network.config, vocabulary_of(base)
        highest = int(self.network.target_ids.max()) + 1 if config.reduced else config.draft_vocab_size
        if highest > size or config.layer.vocab_size > base.get_input_embeddings().weight.shape[0]:
            raise ValueError(
                f"{self.name} knows token ids up to {max(highest, config.layer.vocab_size)}, and the target has {size}: it is another target's"
            )

    @torch.no_grad()
    def logits_along(
        self, target: PreTrainedModel, ids: torch.Tensor, states: torch.Tensor, keep: int, places: int = 1
    ) -> torch.Tensor:
        """Return the logits for the token after each of the last `keep` positions of a text `ids` (T,), (keep, V). keep < T.

        The first of them is drafted as the first token of a draft, from the target's states, the next as the second, from the network's output, and
        so on; every `places`-th starts a new draft. `states` (T − 1, layers · H): the target's for all tokens but the last, as kept by `hook`.
        """
        model, count = self.make_model(target, 1, len(ids) + 1, vocabulary_of(target)), len(ids)
        if places == 1:
            model.learn(states[None], [count - 1])
            return model.feed(ids[None, 1:], [count - 1], keep=keep)[0]
        found: list[torch.Tensor] = []
        for first in range(count - keep, count, places):
            model.rollback(model.lengths)
            model.learn(states[None, model.known[0] : first], [first])
            for place in range(first, min(first + places, count)):
                fed = ids[None, model.lengths[0] : place + 1]
                found.append(model.feed(fed, [fed.shape[1]], keep=1)[0])
        return torch.cat(found)
