"""A text and what may stand in its tokens' places, read in one forward under a 4-D mask."""

import math
from typing import Any

import torch
from transformers import DynamicCache

from ...artifacts.features import FeatureTap
from ...models.architecture import Architecture
from ...models.compat import CACHE
from ...models.introspection import base_of
from ...models.masks import layer_visibility
from ...models.quirks.rope import ChangingRope
from .continuing import in_common


Masks = torch.Tensor | dict[str, torch.Tensor]
WORTH_KEEPING = 16  # tokens that two texts have in common


class AtOnce:
    """Reads texts one behind the other; what they begin with in common, such as worked examples, once."""

    def __init__(self, model: Any, tap: FeatureTap):
        """`tap`: takes the states, and is entered."""
        self.model, self.tap, self.facts = model, tap, Architecture.of(model)
        self.extra: dict[str, Any] = {"logits_to_keep": 1} if self.facts.keeps_logits else {}
        self.shares = math.isinf(self.facts.reach) and ChangingRope.of(base_of(model), 1) is None
        self.read, self.cache = list[int](), DynamicCache()  # the text before, and its keys and values

    def __call__(self, text: list[int], others: list[tuple[int, int]], first: int) -> tuple[torch.Tensor, int]:
        """The states (n, H) of a text's last tokens and of the `others` behind it, and how many tokens were not read for them, up to `first`.

        `others`: (token, place), each of which sees the text in front of its place, and itself.
        """
        held = min(in_common(self.read, text), first) if self.shares else 0
        held = held if held >= WORTH_KEEPING else 0
        self.read, self.cache = text, _first(self.cache, held)
        device = self.facts.device
        tokens = torch.tensor(text + [token for token, _ in others], device=device)[None]
        at = torch.tensor([place for _, place in others], device=device, dtype=torch.long)
        places = torch.cat([torch.arange(len(text), device=device), at])[None]
        self.model(
            # As the engine shows a draft of a smaller vocabulary what it cannot know.
            input_ids=tokens[:, held:].clamp(max=self.facts.known - 1),
            position_ids=places[:, held:],
            attention_mask=_below(_masks(self.facts, places, len(text)), held),
            **{CACHE: self.cache if self.shares else None},
            use_cache=self.shares,
            **self.extra,
        )
        return self.tap.latest[0], held


def _first(cache: DynamicCache, tokens: int) -> DynamicCache:
    """Another cache with the first tokens of this one (whose own `crop` counts otherwise in other releases)."""
    out = DynamicCache()
    for i, layer in enumerate(cache.layers if tokens else ()):
        out.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], i)
    return out


def _below(masks: Masks, held: int) -> Masks:
    """Of masks (1, 1, Q, Q) the rows of the tokens behind the first `held`."""
    if isinstance(masks, dict):
        return {kind: mask[:, :, held:] for kind, mask in masks.items()}
    return masks[:, :, held:]


def _masks(facts: Architecture, positions: torch.Tensor, length: int) -> Masks:
    """An additive mask (1, 1, Q, Q) in the model's dtype, one for each kind of layer if there are several.

    `positions` (1, Q) are the `position_ids`; the first `length` tokens are the text. It never sees what is appended, and an
    appended token sees the text before its position and itself.
    """
    width = positions.shape[1]
    alone = torch.eye(width, dtype=torch.bool, device=positions.device)
    added = torch.arange(length, width, device=positions.device)
    masks = {}
    for kind in facts.windows:
        seen = alone.clone()
        seen[:, :length] |= layer_visibility(facts, kind, positions, length)[0, 0]
        seen[added, positions[0, length:]] = False  # the text's own token there
        mask = torch.zeros(1, 1, width, width, dtype=facts.dtype, device=positions.device)
        masks[kind] = mask.masked_fill_(~seen, torch.finfo(facts.dtype).min)
    return masks if len(masks) > 1 else next(iter(masks.values()))
