"""Write the texts of a Ray dataset: models once an actor, `generate_many` over each block of rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import PreTrainedModel

from ..server.named_drafters import load_pair
from ..server.row_writer import RowWriter


class Writer:
    """Write a text for each row of a Ray dataset, inside `dataset.map_batches`.

    A row has a `prompt` (a text or token ids) or `messages`, and may have an `id`, limits and `hints`. It is returned with `text`, `token_ids`, `finish_reason`, `error`, …:
    a row that cannot be continued has one line in `error` and no text, and does not stop the job.

    Pass `batch_format="pyarrow"` to `map_batches`. A row's random numbers depend on its id alone (any JSON
    value, by default its prompt), not on its block, its actor or a retry: rows that share it share them. Texts depend
    on their block where what drafts reads other rows (SPRINTER's stop, `joint_goodput`, the drafter `auto`).
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        policy: object = "strict",
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        seed: int = 0,
        chat: bool = False,
        load_models: Callable[[], tuple[PreTrainedModel, dict[str, Any]]] | None = None,
        **settings: object,
    ):
        """Load the models, once an actor.

        Args:
            target, draft: a folder or a Hub id that every worker can read; without both the demo's.
            policy: as `lossy_policy=` of `generate`. settings: as for `generate_many`: `max_rows`, `max_new_tokens`, `do_sample`, ….
            dtype, device: as for `hla.load`; device "auto": the GPU that Ray assigned to the actor, if any.
            seed, chat: of all rows' random numbers; apply the tokenizer's chat template to prompts that are texts.
            load_models: in place of target, draft and policy: a function that returns the target and the other arguments of `generate_many`.
        """
        if load_models is None:
            model, assistant, tokenizer = load_pair(target, draft, dtype, device)
            arguments: dict[str, Any] = {"assistant_model": assistant, "lossy_policy": policy, "tokenizer": tokenizer}
        elif (target, draft, policy) == (None, None, "strict"):
            model, arguments = load_models()
        else:
            raise ValueError("load_models is in place of target, draft and policy: pass either")
        self.rows = RowWriter(model, {**arguments, **settings}, seed=seed, chat=chat)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return a block with its rows' texts."""
        if not isinstance(batch, pa.Table):  # NumPy's columns cannot have whole numbers beside nulls
            raise TypeError('hla.ray.Writer: pass batch_format="pyarrow" to map_batches')
        return self.rows.write_table(batch)
