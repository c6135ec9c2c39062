"""Layers of sparse attention with an index (DeepSeek V3.2): each token attends to those whose index keys score best.

A `RowCache` holds index keys in as many further layers, which grow, are copied and overwritten like any other.
"""

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from .row_cache import RowLayer


class IndexedRowLayer(RowLayer):
    """A layer whose index keys are in another one, an `IndexKeys`."""

    @property
    def index(self) -> RowLayer:
        layers = self.owner.layers
        return layers[self.number + len(layers) // 2]

    def update_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        """Write a block's index keys, (B, Q, d); return those of all tokens, (B, visible, d)."""
        return self.index.update(keys[:, None], keys[:, None, :, :0])[0][:, 0]

    def export_to(self, out: Cache, length: int, seen: torch.Tensor | None) -> None:
        super().export_to(out, length, seen)
        if self.index.is_initialized:
            out.update_indexer(self.index.states_of(length, seen)[0][:, 0], self.number)

    def adopt(self, layer: CacheLayerMixin, columns: torch.Tensor) -> None:
        super().adopt(layer, columns)
        if layer.indexer_keys is not None:
            places = columns.to(layer.indexer_keys.device)[..., None]
            self.update_indexer(layer.indexer_keys.gather(1, places.expand(-1, -1, layer.indexer_keys.shape[-1])))


class IndexKeys(RowLayer):
    """Index keys, as keys of one head beside empty values."""

    def export_to(self, out: Cache, length: int, seen: torch.Tensor | None) -> None:
        """Do nothing: the layer itself exports them."""
