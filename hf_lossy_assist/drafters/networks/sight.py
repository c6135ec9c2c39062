"""How far back the layers of a draft network see: windows, as the network was trained with them.

`speculators` trains a window that ends where a draft begins: all tokens of a draft see the same part of the text. DFlash files of z-lab and ModelOpt
have one that moves on with each token, as Transformers' sliding windows do. Within a draft nothing is hidden.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...validation import check_flag, check_int, listed, shown


FULL, SLIDING = "full_attention", "sliding_attention"  # Transformers' kinds of layers
WIDEST = 2**30  # largest window accepted


class Sight(NamedTuple):
    """One layer's view of a text and of the tokens drafted after it.

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

        Args: `slots` (1 or B, Q): those of the tokens, in ascending order. `begins` (1 or B, 1 or Q): the slot from which each token's draft begins.
        """
        keys = torch.arange(visible, device=slots.device)
        seen = keys <= (slots if self.causal else slots[:, -1:])[..., None]
        if self.reach is not None:
            first = (slots if self.moves else begins) - self.reach
            seen = seen & ((keys >= first[..., None]) | (keys >= begins[..., None]))
        return seen[:, None]


CAUSAL = Sight(causal=True)


def masks_of(
    sights: Sequence[Sight], slots: torch.Tensor, begins: torch.Tensor, visible: int, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the mask of each layer, see `Sight.seen`; with a `dtype`, additive ones. Layers with one sight share a mask."""
    masks: list[torch.Tensor] = []
    for layer, sight in enumerate(sights):
        same = sights.index(sight)
        if same == layer:
            seen = sight.seen(slots, begins, visible)
            if dtype is not None:
                seen = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
            masks.append(seen)
        else:
            masks.append(masks[same])
    return masks


def read_windows(given: Mapping[str, Any], where: str, layers: int) -> list[int | None]:
    """Return the `sliding_window` of each layer in a config, None for layers that see all, by the rules of Transformers' configs.

    Raises: `TypeError` or `ValueError`, one line.
    """
    kinds, window, used = (given.get(name) for name in ("layer_types", "sliding_window", "use_sliding_window"))
    if kinds is None:
        if used is not None:
            check_flag(f"{where}: use_sliding_window", used)
        first = given.get("max_window_layers") or 0
        check_int(f"{where}: max_window_layers", first, 0)
        # Qwen's configs have a window that is not in use; those of Llama have one only if it is.
        on = used if used is not None else window is not None and given.get("model_type") != "qwen3"
        kinds = [SLIDING if on and layer >= first else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise ValueError(
            f"{where}: layer_types: expected {layers} of {listed((FULL, SLIDING))}, one a layer, got {shown(kinds)}"
        )
    if SLIDING in kinds:
        check_int(f"{where}: sliding_window", window, 1, WIDEST)
    return [window if kind == SLIDING else None for kind in kinds]
