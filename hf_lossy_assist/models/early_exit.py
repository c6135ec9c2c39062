"""Self-speculation: the target's first layers as the draft model."""

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..validation import check_int
from .facts import facts_of
from .introspection import base_of, blocks_of, remember
from .probe import why_not_rows
from .row_model import RowModel


def early_exit(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a model of `model`'s first `layers` blocks, with its embeddings, last norm and output head; no weight is
    copied.

    Elhoushi et al., "LayerSkip" (huggingface.co/papers/2404.16710): a target trained to exit early can draft for
    itself, and a deeper exit can serve as the companion. Early layers of other targets predict badly; measure first.

    Raises: `TypeError` if `model` is not a Transformers model; `ValueError`, one line, for a model whose blocks are not
    found and for an invalid number of layers.
    """
    base, blocks = _find_blocks(model)
    check_int("early_exit.layers", layers, 1)
    if layers >= len(blocks):
        raise ValueError(f"early_exit.layers: expected fewer than the {len(blocks)} blocks of the model, got {layers}")
    return _first_blocks(base, blocks, layers)


def _find_blocks(model: PreTrainedModel) -> tuple[PreTrainedModel, torch.nn.ModuleList]:
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"early_exit: expected a loaded Transformers model, got {type(model).__name__}")
    if facts_of(base).keeps_states:
        raise ValueError(f"early_exit: {type(base).__name__} keeps a recurrent state, which no exit was tried with")
    blocks = None if why_not_rows(base) is not None else blocks_of(base)
    if blocks is None:
        raise ValueError(
            f"early_exit: {type(base).__name__} is no decoder that runs in batches with one list of blocks"
        )
    return base, blocks


def _first_blocks(base: PreTrainedModel, blocks: torch.nn.ModuleList, layers: int) -> PreTrainedModel:
    """Return the model with its first `layers` blocks alone."""
    config = copy.deepcopy(base.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    config.name_or_path = f"{base.config.name_or_path}[:{layers}]"
    with torch.device("meta"):  # its initial weights are never allocated
        draft: PreTrainedModel = type(base)(config)
    draft.eval()  # now: afterwards it contains the target's modules, which may be in training mode
    _graft(draft, base, blocks, torch.nn.ModuleList(blocks[:layers]))
    draft.generation_config = copy.deepcopy(base.generation_config)
    remember(draft, "rows", lambda: None)  # the whole model passed that probe, and each call by name makes a new exit
    return draft


def _graft(
    draft: torch.nn.Module, base: torch.nn.Module, blocks: torch.nn.ModuleList, taken: torch.nn.ModuleList
) -> None:
    """Give `draft` the parameters and modules of `base`, but `taken` for `blocks`;
    the modules around them, at any depth, stay separate."""
    draft._parameters.update(base._parameters)
    draft._buffers.update(base._buffers)
    for name, child in base._modules.items():
        if child is blocks:
            draft._modules[name] = taken
        elif child is not None and any(module is blocks for module in child.modules()):
            _graft(getattr(draft, name), child, blocks, taken)
        else:
            draft._modules[name] = child


class ExitModel(RowModel):
    """A draft of the target's first blocks on its row cache, which already holds keys and values of all tokens that the
    target has read.

    The entries it writes for drafted tokens are in the slots that the target overwrites in verification.
    """

    def __init__(self, draft: PreTrainedModel, target: RowModel, vocabulary: int | None = None):
        # For each row, its length in this model since the target's last forward.
        self._ahead = [0] * len(target.lengths)
        self._target = target
        super().__init__(draft, len(target.lengths), target.cache.limit, vocabulary)
        self.cache = target.cache
        target.needs_prefill = True  # else this model would have to read the prompts

    @property
    def lengths(self) -> list[int]:
        return [max(pair) for pair in zip(self._ahead, self._target.lengths, strict=True)]

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._ahead = list(lengths)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop what the target has not read; this model's entries may have been overwritten."""
        self._ahead = [0] * len(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows; the cache is the target's, which has selected them already."""
        self._ahead = [self._ahead[row] for row in rows]

    def export(self, rows: int, mask: torch.Tensor | None) -> None:
        """Return None: the cache is the target's."""
