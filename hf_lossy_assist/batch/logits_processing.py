"""Logits processors for a whole block, each position with the matching prefix."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import PrefixConstrainedLogitsProcessor

from ..grammar.structured import StructuredOutput
from ..uploads import on_device
from .processor_kinds import PREFIX_FREE, WARPERS, for_row, is_function, keeps_rows, only_functions
from .processor_states import RaisedAhead, SharedState, TextState


class Processing:
    """A `LogitsProcessorList` for rows of different lengths.

    Processors that are not known to be functions of `input_ids` and `scores` are called in text order with the call's full batch, each row
    in its place, as in `generate`. Their state is rolled back when tokens are rejected.
    """

    # The processors were made for one text among others; other texts may have different ones.
    apart = False
    unseen = 0  # leading columns that processors do not see, as in `Rows`

    def __init__(self, processors: LogitsProcessorList, batch: int, sampling: bool = True):
        """`batch`: the call's number of rows. `sampling`: whether the call draws random numbers."""
        self.processors, self.batch = processors, batch
        self._of_rows: dict[tuple[int, int], Any] = {}
        self._was_tried = False
        self.needs_prefix = not all(type(p) in PREFIX_FREE for p in processors)
        self.may_forbid = not all(type(p) in WARPERS for p in processors)  # possibly all of a draft's tokens
        followed = [p for p in processors if not is_function(p)]
        self.runs_callers_code = bool(followed)
        self.state: TextState | SharedState | None = None
        if followed:
            self.state = TextState(followed, not sampling) if batch == 1 else SharedState(followed, not sampling, True)

    def beside_others(self, apart: bool, holders: dict[int, Any]) -> None:
        """Prepare for texts of other calls beside this call's; `apart`: they have separate processors, else they share these.

        `holders`: see `TextState.begin_among_others`.
        """
        self.apart = apart
        if isinstance(self.state, TextState) and apart:
            self.state.begin_among_others(holders)
        elif self.state is not None:
            self.state = SharedState(self.state.processors, self.state.seeded, False)

    def functions(self) -> "Processing":
        """Return the processors that are known functions of the text and the scores."""
        out = Processing(only_functions(self.processors), self.batch)
        out.unseen = self.unseen
        return out

    def commit(self, row: int, count: int) -> None:
        """Commit `count` more tokens of row `row`."""
        if self.state is not None:
            self.state.commit(count)

    def settle(self) -> None:
        """Leave the processors' state as `generate` does: after the committed text."""
        if self.state is not None:
            self.state.settle()

    def __call__(
        self,
        ids: torch.Tensor,
        lengths: Sequence[int],
        scores: torch.Tensor,
        row_ids: Sequence[int],
        active_positions: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Process `scores` (B, Q, V) float32, whose position i of row b follows `ids[b, : lengths[b] + i]`; return (B, Q, V).

        `row_ids[b]`: index of row b in the call. `active_positions[b]`: the number of leading positions of row b at which a token may still
        be committed; None: all. The caller's code is not called at the others, nor after a token that it forbids, where a grammar has no
        answer.
        """
        if not self.processors:
            return scores
        if self.unseen:
            ids, lengths = ids[:, self.unseen :], [length - self.unseen for length in lengths]
        batch, width, size = scores.shape
        if not self.needs_prefix:
            nothing = ids[:, :0].repeat_interleave(width, dim=0)
            return self.processors(nothing, scores.reshape(-1, size)).view(batch, width, size)
        if not self.runs_callers_code:
            return self._everywhere(ids, lengths, scores, row_ids)
        out, active = torch.empty_like(scores), list(active_positions or [width] * batch)
        for length in sorted({n + i for n in set(lengths) for i in range(width)}):
            rows = [b for b, n in enumerate(lengths) if 0 <= length - n < width]
            places = [length - lengths[b] for b in rows]
            # A copy, since processors may change it; a single row needs no index tensor.
            found = scores[:, places[0]].clone() if batch == 1 else scores[rows, places]
            pending = [k for k, (b, place) in enumerate(zip(rows, places, strict=True)) if place < active[b]]
            texts = PositionTexts(ids, lengths, row_ids, length, drafted=width > 1)
            found, forbidding = self._at_place(texts, rows, pending, found)
            if batch == 1:
                out[:, places[0]] = found
            else:
                out[rows, places] = found
            for b in forbidding:
                active[b] = min(active[b], length - lengths[b] + 1)
        return out

    def _everywhere(
        self, ids: torch.Tensor, lengths: Sequence[int], scores: torch.Tensor, row_ids: Sequence[int]
    ) -> torch.Tensor:
        """Run functions of text and scores at all positions, grouped by text length. Arguments as in `__call__`."""
        batch, width, size = scores.shape
        ends = [
            n + i for n in lengths for i in range(width)
        ]  # length of the text before position i of row b, at index b · width + i
        order = sorted(range(len(ends)), key=ends.__getitem__)
        found, rows = scores.reshape(-1, size), None
        if in_order := order == list(range(len(ends))):
            found = found.clone()  # processors may change it
        else:
            index = on_device(order, scores.device)
            found, rows = found.index_select(0, index), index // width
        groups = [(end, list(places)) for end, places in groupby(order, key=ends.__getitem__)]
        for processor in self.processors:
            if type(processor) in PREFIX_FREE:
                found = processor(ids[:, :0].repeat_interleave(width, dim=0), found)
                continue
            parts, first = [], 0
            for end, places in groups:
                some, texts = slice(first, first + len(places)), ids[:, :end]
                first += len(places)
                if len(places) < batch:
                    b = places[0] // width  # adjacent rows form a slice
                    if rows is None or len(places) == 1:
                        texts = texts[b : b + len(places)]
                    else:
                        texts = texts.index_select(0, rows[some])
                parts.append(self._function(processor, texts, [row_ids[k // width] for k in places], found[some]))
            found = torch.cat(parts) if len(parts) > 1 else parts[0]
        if not in_order:
            found = torch.empty_like(found).index_copy_(0, index, found)
        return found.view(batch, width, size)

    def _at_place(
        self, texts: "PositionTexts", rows: Sequence[int], pending: Sequence[int], scores: torch.Tensor
    ) -> tuple[torch.Tensor, set[int]]:
        """Process `scores` (n, V) after the texts of `rows`; call processors that may have state for `rows[pending]` only.

        Returns the scores, and the rows whose next token one of those processors forbids.
        """
        if self.state is None or not pending or not self.state.reaches(texts.length):
            return self._run(texts, rows, [] if self.state else pending, scores)
        everyone = len(pending) == self.batch
        if not self._was_tried:  # both trial calls see the same random numbers
            self._was_tried = True
            devices = [scores.device] if scores.device.type == "cuda" else []
            with torch.random.fork_rng(devices), self.state.at(texts.length, everyone):
                first, _ = self._run(texts, rows, pending, scores.clone())
            with self.state.at(texts.length, everyone):
                second, forbidding = self._run(texts, rows, pending, scores)
            if not torch.allclose(first, second, equal_nan=True):
                self.state.refuse("changed its answer when it was asked twice about the same text")
            return second, forbidding
        try:
            with self.state.at(texts.length, everyone):
                return self._run(texts, rows, pending, scores)
        except RaisedAhead:  # at a drafted position: an error only if the text reaches it
            return self._run(texts, rows, [], scores)

    def _run(
        self, texts: "PositionTexts", rows: Sequence[int], pending: Sequence[int], found: torch.Tensor
    ) -> tuple[torch.Tensor, set[int]]:
        forbidding: set[int] = set()
        for processor in self.processors:
            if is_function(processor):
                found = self._one(processor, texts, rows, found)
            elif pending:
                active = [rows[k] for k in pending]
                whole = len(pending) == len(rows)
                processed = self._one(processor, texts, active, found if whole else found[pending]).to(found.dtype)
                if whole:
                    found = processed
                else:
                    found[pending] = processed
                forbidding |= set(texts.forbidden(active, processed)) if texts.drafted else set()
        return found, forbidding

    def blame(self, ids: torch.Tensor, length: int, scores: torch.Tensor, row: int) -> str | None:
        """Name the processor that turns `scores` (V,) after the first `length` of `ids` into no distribution; None: none does.

        `row`: index in the call.
        """
        length -= self.unseen
        texts, rest = PositionTexts(ids[None, self.unseen :], [length], [row], length), scores[None].clone()
        with nullcontext() if self.state is None else self.state.at(length, False):
            for processor in self.processors:
                rest = self._one(processor, texts, [0], rest)
                if bool((rest == float("-inf")).all()):
                    return f"{type(processor).__name__} leaves no token"
                if bool(rest.isnan().any() | rest.isposinf().any()):
                    return f"{type(processor).__name__} gives NaN or infinite scores"
        return None

    def _one(self, processor: Any, texts: "PositionTexts", rows: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """Run one processor on `scores` (n, V) after the texts of `rows`."""
        ids, here = texts.ids[:, : texts.length], [texts.row_ids[b] for b in rows]
        if not is_function(processor) and type(processor) is not PrefixConstrainedLogitsProcessor:  # the caller's code
            if self.batch == 1:
                return checked(processor, ids, scores)
            rows_shown = texts.of_call(rows, self.batch)
            place = {b: k for k, b in enumerate(rows)}
            shown = scores[[place.get(b, 0) for b in rows_shown]]  # (rows of the call, V)
            return checked(processor, ids[rows_shown], shown)[here]
        return self._function(processor, ids if len(rows) == len(ids) else ids[rows], here, scores)

    def _function(
        self, processor: LogitsProcessor, ids: torch.Tensor, here: Sequence[int], scores: torch.Tensor
    ) -> torch.Tensor:
        """Run a Transformers processor on `scores` (n, V) after `ids` (n, length), the texts of the call's rows `here`."""
        if list(here) == list(range(self.batch)) or not keeps_rows(processor):
            return processor(ids, scores)
        if isinstance(processor, StructuredOutput):
            return processor.of_rows(here, self.batch)(ids, scores)
        out = []
        for k, row in enumerate(here):
            key = (id(processor), row)
            if key not in self._of_rows:
                self._of_rows[key] = for_row(processor, row, self.batch)
            out.append(self._of_rows[key](ids[k : k + 1], scores[k : k + 1]))
        return torch.cat(out)


@dataclass(frozen=True)
class PositionTexts:
    """The first `length` tokens of rows with `lengths[b]` committed tokens and possibly drafts after them; `row_ids[b]`: index in the call."""

    ids: torch.Tensor  # (B, ≥ length)
    lengths: Sequence[int]
    row_ids: Sequence[int]
    length: int
    drafted: bool = False

    def forbidden(self, rows: Sequence[int], scores: torch.Tensor) -> list[int]:
        """Return those of `rows` whose next, drafted token has probability 0 under `scores` (n, V)."""
        if self.length >= self.ids.shape[1]:
            return []
        at = slice(self.length, self.length + 1)
        following = self.ids[rows, at] if len(rows) > 1 else self.ids[rows[0], at][None]  # no index tensor
        never = (scores.gather(1, following)[:, 0] == float("-inf")).tolist()
        return [b for b, forbidden in zip(rows, never, strict=True) if forbidden]

    def of_call(self, rows: Sequence[int], batch: int) -> list[int]:
        """Choose the row b whose text stands in for each of the call's `batch` rows.

        A row that is not in `rows` shows its text if that is long enough, else the text of `rows[0]`: a processor may fail on a text that
        was never written.
        """
        shown = [rows[0]] * batch
        for b, (row, length) in enumerate(zip(self.row_ids, self.lengths, strict=True)):
            if b in rows or length >= self.length:
                shown[row] = b
        return shown


def checked(processor: Any, texts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Run `processor`, which may change `scores` (B, V) in place. Raises: `ValueError` if it returns another shape."""
    out = processor(texts, scores)
    if not isinstance(out, torch.Tensor) or out.shape != scores.shape:
        found = f"a tensor of shape {list(out.shape)}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
        raise ValueError(
            f"logits_processor: {type(processor).__name__} must return scores of the shape that it was given, "
            f"{list(scores.shape)}, and returned {found}: return one row for each row of scores"
        )
    return out
