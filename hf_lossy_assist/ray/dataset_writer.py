"""Write the texts of a Ray dataset: models once an actor, `generate_many` over each block of rows."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedModel

from ..generation.many import generate_many
from ..generation.named_drafters import load_pair
from ..models.introspection import end_tokens
from ..server.fields import RequestLimits
from ..server.messages import read_messages
from ..stats.speculation import COUNTS
from ..tasks.prompt_files import make_table
from ..validation import LIMITS, MOST, MOST_NEW_TOKENS, check_int, one_line, shown


Row = dict[str, Any]
WRITTEN = {
    "text": pa.string(),
    "token_ids": pa.list_(pa.int32()),
    "finish_reason": pa.string(),  # "stop" or "length"
    "token_sources": pa.list_(pa.string()),
    "speculation": pa.struct([(name, pa.int64()) for name in COUNTS]),
    "error": pa.string(),  # one line, for a row without a text
}
RENAME = "which the writer makes: rename it, or drop it"
PER_ROW = (*LIMITS, "hints")
ANY_LENGTH = RequestLimits({}, MOST_NEW_TOKENS, MOST)


def seed_of_row(seed: int, row_id: object) -> int:
    """Return the seed of a row's random numbers, from the writer's seed and the row's id: a JSON value. In [0, 2^63)."""
    digest = hashlib.sha256(json.dumps([seed, row_id], sort_keys=True, default=str).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Writer:
    """Write a text for each row of a Ray dataset, inside `dataset.map_batches`.

    A row has a `prompt` (a text or token ids) or `messages`, and may have an `id`, `max_new_tokens`, `min_new_tokens`, `stop_strings`, `seed` and
    `hints`. The row is returned with `text`, `token_ids`, `finish_reason` ("stop" or "length"), `token_sources`, `speculation` (counts of this text) and
    `error`: a row that cannot be continued has one line there and no text, and does not stop the job.

    Pass `batch_format="pyarrow"`: NumPy's columns cannot have whole numbers beside nulls. A row's random numbers depend on its id alone, not on its block, its actor or a retry; rows
    without an id use their prompt as id.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        policy: object = "strict",
        *,
        dtype: str = "auto",
        device: str = "auto",
        seed: int = 0,
        chat: bool = False,
        load_models: Callable[[], tuple[PreTrainedModel, Row]] | None = None,
        **settings: object,
    ):
        """Load the models, once an actor.

        Args:
            target, draft: a folder or a Hub id that every worker can read; without both the demo's.
            policy: as `lossy_policy=` of `generate`. settings: as for `generate_many`: `max_rows`, `max_new_tokens`, `do_sample`, ….
            dtype, device: as for `hla.load`; device "auto": the GPU that Ray assigned to the actor, if any.
            chat: apply the tokenizer's chat template to prompts that are texts.
            load_models: in place of target, draft and policy: a function that returns the target and the other arguments of `generate_many`.

        Raises: `ValueError`, `TypeError` or `OSError`, one line, for models, policies and settings that cannot be used.
        """
        given: Row
        if load_models is not None:
            if (target, draft, policy) != (None, None, "strict"):
                raise ValueError("load_models is in place of target, draft and policy: pass either")
            self.target, given = load_models()
            if "tokenizer" not in {**given, **settings}:
                raise ValueError("load_models: expected the target and the other arguments, a tokenizer among them")
        else:
            self.target, assistant, tokenizer = load_pair(target, draft, dtype, device)
            given = {"assistant_model": assistant, "lossy_policy": policy, "tokenizer": tokenizer}
        check_int("seed", seed, *LIMITS["seed"])
        self.seed, self.chat, self.settings = seed, chat, {**given, **settings}
        self.tokenizer = self.settings["tokenizer"]
        self.ends = end_tokens(self.target.generation_config)
        for _ in generate_many(self.target, [{"prompt": [1, 1], "max_new_tokens": 1}], seed=0, **self.settings):
            pass  # refuses what suits no row before the first block

    def __call__(self, batch: Any) -> pa.Table:
        """Return a block with its rows' texts. `batch`: a `pyarrow.Table`, or columns by name."""
        table = batch if isinstance(batch, pa.Table) else make_table(batch)
        if there := sorted(WRITTEN.keys() & set(table.column_names)):
            raise ValueError(f"the dataset has a column {shown(there[0])}, {RENAME}")
        rows = self.write_rows(table.to_pylist())
        for name, kind in WRITTEN.items():
            table = table.append_column(name, pa.array([row.get(name) for row in rows], kind))
        return table

    def write_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with their texts. A row with an `error` already is returned as it is."""
        written, prompts = list(rows), dict[int, Row]()
        for number, row in enumerate(rows):
            if "error" not in row:
                try:
                    prompts[number] = self._read(row)
                except (ValueError, TypeError) as error:
                    written[number] = row | {"error": _name_row(row, error)}
        for number, found in self._write(prompts).items():
            why = found["error"]
            written[number] = rows[number] | (found if why is None else {"error": _name_row(rows[number], why)})
        return written

    def _read(self, row: Row) -> Row:
        """Return a row's prompt with its limits and its seed. Raises: `ValueError`, one line."""
        if there := sorted(WRITTEN.keys() & row.keys()):
            raise ValueError(f"the row has {shown(there[0])}, {RENAME}")
        prompt, messages = row.get("prompt"), row.get("messages")
        if (prompt is None) == (messages is None):
            raise ValueError("expected a prompt or messages, got " + ("neither" if prompt is None else "both"))
        row_id = (prompt if messages is None else messages) if row.get("id") is None else row["id"]
        if self.chat and isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        if messages is not None:
            if isinstance(messages, list) and all(isinstance(turn, dict) for turn in messages):
                # Arrow fills missing fields with null.
                messages = [{name: value for name, value in turn.items() if value is not None} for turn in messages]
            prompt = read_messages({"messages": messages}, self.tokenizer, ANY_LENGTH)
        limits = {name: row[name] for name in PER_ROW if row.get(name) is not None}
        return {"prompt": prompt, "seed": seed_of_row(self.seed, row_id), **limits}

    def _write(self, prompts: Mapping[int, Row]) -> dict[int, Row]:
        """Return the texts of rows by number; a row whose error ends the others' texts is written again by itself."""
        out: dict[int, Row] = {}
        given: Row = {**self.settings, "numbers": prompts, "seed": self.seed}
        given["refused"] = lambda number, error: out.update({number: {"error": error}})
        texts = generate_many(self.target, prompts.values(), **given)
        try:
            for result in texts:
                stops = prompts[result.index].get("stop_strings") or self.settings.get("stop_strings") or ()
                out[result.index] = {**result.describe(self.ends, stops), "error": None}
        except ValueError as error:
            for number in prompts.keys() - out.keys():
                out |= self._write({number: prompts[number]}) if len(prompts) > 1 else {number: {"error": error}}
        return out


def _name_row(row: Row, error: Exception) -> str:
    """Return an error in one line, with the row's id in place of its number in the block."""
    line = re.sub(r"prompts: number \d+: |, number \d+,| as number \d+", "", str(error))
    return one_line(line if row.get("id") is None else f"row {row['id']}: {line}", 300)
