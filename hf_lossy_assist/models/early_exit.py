"""Self-speculation: the target's own first layers as its draft."""

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..validation import check_int
from .introspection import base_of, blocks_of, remember
from .probe import why_not_rows
from .recurrent.layers import keeps_states
from .row_model import RowModel


def early_exit(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a model of `model`'s first `layers` blocks, with its embeddings, last norm and output head; no weight is copied.

    Elhoushi et al., "LayerSkip" (huggingface.co/papers/2404.16710): a target trained to exit early drafts for itself, and with more
    of its layers it can be its own companion. Any other target's early layers guess badly; measure before you rely on it.

    Raises: `ValueError`, one line, for a model whose blocks are not found and for a number of layers that it does not have.
    """
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"early_exit: expected a loaded Transformers model, got {type(model).__name__}")
    if keeps_states(base):
        raise ValueError(
            f"early_exit: {type(base).__name__} keeps a recurrent state, and its first layers alone were never tried"
        )
    blocks = None if why_not_rows(base) is not None else blocks_of(base)
    if blocks is None:
        raise ValueError(
            f"early_exit: {type(base).__name__} is no decoder that runs in batches with one list of blocks"
        )
    check_int("early_exit.layers", layers, 1)
    if layers >= len(blocks):
        raise ValueError(f"early_exit.layers: expected fewer than the {len(blocks)} blocks of the model, got {layers}")
    config = copy.deepcopy(base.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    config.name_or_path = f"{base.config.name_or_path}[:{layers}]"
    with torch.device("meta"):  # its own weights are never made
        draft: PreTrainedModel = type(base)(config)
    draft.eval()  # now: later it has the target's modules, which may be in training
    widths = _embedding_widths(draft)
    _graft(draft, base, blocks, layers)
    others = [name for name, width in _embedding_widths(draft).items() if width != widths.get(name, width)]
    if others:  # Gemma 3n's and 4's: something for each layer of each token
        raise ValueError(
            f"early_exit: {type(base).__name__} has embeddings for all of its layers side by side ({others[0].rpartition('.')[2]}), which its first "
            "layers alone cannot read"
        )
    draft.generation_config = copy.deepcopy(base.generation_config)
    remember(draft, "rows", lambda: None)  # the whole model passed that trial, and by name each call makes an exit
    return draft


def _embedding_widths(model: torch.nn.Module) -> dict[str, int]:
    modules = model.named_modules()
    return {name: table.embedding_dim for name, table in modules if isinstance(table, torch.nn.Embedding)}


def _graft(draft: torch.nn.Module, base: torch.nn.Module, blocks: torch.nn.ModuleList, layers: int) -> None:
    """Give `draft` what `base` holds, and of `blocks` the first ones; the modules around them, however deep, stay separate."""
    draft._parameters.update(base._parameters)
    draft._buffers.update(base._buffers)
    for name, part in base._modules.items():
        if part is blocks:
            draft._modules[name] = torch.nn.ModuleList(blocks[:layers])
        elif part is not None and any(module is blocks for module in part.modules()):
            _graft(getattr(draft, name), part, blocks, layers)
        else:
            draft._modules[name] = part


def leaves_early(draft: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Return whether `draft` is made of the target's first blocks and embeddings."""
    first, whole = base_of(draft), base_of(target)
    few, all_ = blocks_of(first), blocks_of(whole)
    if few is None or all_ is None or first.get_input_embeddings() is not whole.get_input_embeddings():
        return False
    return len(few) < len(all_) and all(a is b for a, b in zip(few, all_, strict=False))


class ExitModel(RowModel):
    """An early exit on the target's cache of rows: of what the target has read, its keys and values are there already.

    They are the same numbers, for both compute the first blocks of the same tokens. What it writes of drafted tokens stands where the target
    writes its own when it verifies them, so behind a round it holds what the target holds.
    """

    def __init__(self, draft: PreTrainedModel, target: RowModel, vocabulary: int | None = None):
        # Of each row, where this model has been since the target's last forward.
        self._ahead = [0] * len(target.lengths)
        self._target = target
        super().__init__(draft, len(target.lengths), target.cache.limit, vocabulary, target.types)
        self.cache = target.cache
        self.stand_at(target.columns)
        target.needs_prefill = True  # or it would have to read the prompts itself

    @property
    def lengths(self) -> list[int]:
        return [max(pair) for pair in zip(self._ahead, self._target.lengths, strict=True)]

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._ahead = list(lengths)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget what the target has not read: its own tokens may have been overwritten."""
        self._ahead = [0] * len(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows; their cache is the target's, which has selected them."""
        self._ahead = [self._ahead[row] for row in rows]
        if self.types is not None:
            self.types = self.types[list(rows)]
        self.stand_at(None if self.columns is None else self.columns.select(rows))

    def export(self, rows: int, mask: torch.Tensor | None) -> None:
        """Return no cache: it is the target's."""
