"""Write the texts of rows, which are requests in files or tables: a row that cannot be continued gets an error, and the others their texts."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from transformers import PreTrainedModel

from ..generation.many import generate_many
from ..stats.speculation import COUNTS
from ..tasks.prompts import LIMITS
from ..validation import MOST, MOST_NEW_TOKENS, one_line, shown
from .bodies import ChatBody, RequestLimits, find_longest, read_body
from .messages import read_messages


Row = dict[str, Any]
WRITTEN = {
    "text": pa.string(),
    "token_ids": pa.list_(pa.int32()),
    "finish_reason": pa.string(),  # "stop" or "length"
    "token_sources": pa.list_(pa.string()),
    "speculation": pa.struct([(name, pa.int64()) for name in COUNTS]),
    "error": pa.string(),  # one line, for a row without a text
}
PER_ROW = (*LIMITS, "hints")
READ = ("id", "prompt", "messages", *PER_ROW)
# What other programs read in a row; here these hold for all rows, under `generate_many`'s names.
SHARED_SETTINGS = frozenset(
    "max_tokens stop temperature top_p top_k min_p do_sample num_beams repetition_penalty lossy_policy sampling_params".split()
)
ANY_LENGTH = RequestLimits({}, MOST_NEW_TOKENS, MOST)


def seed_of_row(seed: int, row_id: object) -> int:
    """Return the seed of a row's random numbers, from the writer's seed and the row's id: a JSON value. In [0, 2^63)."""
    digest = hashlib.sha256(json.dumps([seed, row_id], sort_keys=True, default=str).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class RowWriter:
    """Write the texts of rows in a batch.

    Args:
        target: the model. settings: as for `generate_many`, a tokenizer among them, and no seed.
        seed: of all rows' random numbers, with each row's id.
        chat: apply the tokenizer's chat template to prompts that are texts.

    Raises: `ValueError` or `TypeError`, one line, for settings that suit no row.
    """

    def __init__(self, target: PreTrainedModel, settings: Row, *, seed: int = 0, chat: bool = False):
        self.target, self.settings, self.seed, self.chat = target, settings, seed, chat
        self.tokenizer, self.longest = settings["tokenizer"], find_longest(target, None, None)
        trial = {"prompt": [1, 1], "max_new_tokens": 1, "min_new_tokens": 0}
        for _ in generate_many(target, [trial], seed=seed, **settings):
            pass  # refuses what suits no row before the first batch

    def write_table(self, table: pa.Table) -> pa.Table:
        """Return a table with the columns of `WRITTEN`. Raises: `ValueError`, one line, for columns that it cannot have."""
        refuse_columns(table.column_names)
        names = [name for name in table.column_names if name in READ or name in SHARED_SETTINGS]
        rows = self.write(table.select(names).to_pylist())
        for name, kind in WRITTEN.items():
            table = table.append_column(name, pa.array([row.get(name) for row in rows], kind))
        return table

    def write(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with their texts (`WRITTEN`). A row that has an `error` and no prompt is returned as it is."""
        prompts, texts = dict[int, Row](), dict[int, Row]()
        for index, row in enumerate(rows):
            if row.get("error") is not None and row.keys() <= {"id", "error"}:  # nothing could be read there
                continue
            try:
                prompts[index] = self._read(row)
            except (ValueError, TypeError) as error:
                texts[index] = {"error": error}
        texts |= self._write(prompts)
        for index, text in texts.items():
            if text["error"] is not None:
                line = re.sub(
                    r"prompts: number \d+: |, number \d+,| as number \d+| in prompt \d+", "", str(text["error"])
                )
                name, row_id = "", rows[index].get("id")
                if row_id is not None:
                    name = f"row {one_line(row_id, 60)}: "
                text["error"] = one_line(name + line, 300)
        return [row | texts.get(index, {}) for index, row in enumerate(rows)]

    def _read(self, row: Row) -> Row:
        """Return a row's prompt with its limits and its seed. Raises: `ValueError`, one line."""
        refuse_columns(list(row))
        for name, value in row.items():
            if value is not None and name in SHARED_SETTINGS:
                raise ValueError(
                    f"{name!r} in a row does nothing: a row has {', '.join(PER_ROW)}; set others for all rows"
                )
        prompt, messages, row_id = (_plain(row.get(name)) for name in ("prompt", "messages", "id"))
        if (prompt is None) == (messages is None):
            raise ValueError("expected a prompt or messages, got " + ("neither" if prompt is None else "both"))
        if row_id is None:
            row_id = prompt if messages is None else messages
        if self.chat and isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        if messages is not None:
            prompt = read_messages(read_body(ChatBody, {"messages": messages}), self.tokenizer, ANY_LENGTH)
        ids = self.tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
        if isinstance(ids, list) and len(ids) > self.longest:  # it would hold up all others
            raise ValueError(f"the prompt has {len(ids)} tokens, and the target {self.longest} positions: shorten it")
        limits = {name: row[name] for name in PER_ROW if row.get(name) is not None}
        return {"prompt": prompt, "seed": seed_of_row(self.seed, row_id), **limits}

    def _write(self, prompts: Mapping[int, Row]) -> dict[int, Row]:
        """Return the texts of rows by index; a row whose error ends the others' texts is written again by itself."""
        out: dict[int, Row] = {}

        def refuse(index: int, error: Exception) -> None:
            out[index] = {"error": error}

        settings = self.settings | {"numbers": prompts, "refused": refuse}
        try:
            for result in generate_many(self.target, prompts.values(), seed=self.seed, **settings):
                out[result.index] = {**result.describe(), "error": None}
        except ValueError as error:
            for index in prompts.keys() - out.keys():
                out |= self._write({index: prompts[index]}) if len(prompts) > 1 else {index: {"error": error}}
        return out


def refuse_columns(names: Sequence[str]) -> None:
    """Refuse a table's columns that the writer makes, and two of one name. Raises: `ValueError`, one line."""
    for name in names:
        if name in WRITTEN:
            raise ValueError(f"there is a column {shown(name)}, which the writer makes: rename it, or drop it")
        if names.count(name) > 1:
            raise ValueError(f"there are two columns {shown(name)}: rename or drop one of them")


def _plain(value: Any) -> Any:
    """Return JSON without arrays, and without the fields that are null: Arrow fills those that another row of the batch has."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value.tolist() if hasattr(value, "tolist") else value
