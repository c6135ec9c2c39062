"""Logits processors for rows of different lengths, each position with the matching prefix."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import PrefixConstrainedLogitsProcessor

from ..rules.base import AcceptanceRule
from ..tensors import on_device
from ..text.structured import StructuredOutput
from ..validation import one_line
from .callers_code import PREFIX_FREE, WARPERS, for_row, is_function, keeps_rows, name_of, refuse_state, way_out


ONE_EACH = (
    "make one for each row, as generate_many does with logits_processor=a function of a prompt's token ids, or pass "
    "prompts one by one"
)


class Processing:
    """A `LogitsProcessorList` for rows of different lengths.

    Known functions of text and scores run at all positions of a block at once. With the caller's processors among them,
    all run at one position after another (`step`): a single text's see the calls of `generate`; those of several texts
    see the call's full batch, each row in its place, and must keep nothing.
    """

    apart = False  # rows have separate processors

    def __init__(self, processors: Sequence[Any], batch: int, sampling: bool = True, unseen: int = 0):
        """`batch`: the call's number of rows. `sampling`: whether the call draws random numbers. `unseen`: leading
        columns that processors do not see, as in `Rows`.
        """
        self.processors, self.batch, self.sampling, self.unseen = processors, batch, sampling, unseen
        self.functions = LogitsProcessorList([p for p in processors if is_function(p)])
        callers = [p for p in processors if not is_function(p)]
        self.runs_callers_code, self.is_empty = bool(callers), not processors
        self.needs_prefix = not all(type(p) in PREFIX_FREE for p in self.functions)
        self.may_forbid = not all(type(p) in WARPERS for p in self.functions)  # possibly all of a draft's tokens
        self.shared: Collection[Any] = callers if batch > 1 else ()  # serve several texts
        self.watches_numbers = batch > 1 and not sampling  # other texts' processors may draw torch's global ones
        self._may_begin = batch > 1  # all rows' first call is that of `generate`, and may set what later ones leave
        self._of_rows: dict[tuple[int, int], Any] = {}

    def refuse_callers(self, rule: AcceptanceRule, yields: bool) -> None:
        """Raise `ValueError` where `rule` cannot decide position by position, or if Transformers' `generate` would take
        over (`yields`)."""
        if rule.scope == "block":
            refuse_unknown(self.processors, f"{type(rule).__name__} decides about whole drafts: choose another rule")
        if yields and self.shared:
            refuse_unknown(self.processors, "one object serves several texts")

    def serve_several(self, shared: Collection[int]) -> None:
        """Prepare for other calls' texts beside this call's, which have the processors with these ids, too."""
        self.shared = [p for p in self.processors if id(p) in shared or type(p) is PrefixConstrainedLogitsProcessor]
        self.watches_numbers = not self.sampling

    def __call__(
        self, ids: torch.Tensor, lengths: Sequence[int], scores: torch.Tensor, row_ids: Sequence[int]
    ) -> torch.Tensor:
        """Run the known functions on `scores` (B, Q, V) float32; return (B, Q, V).

        Position i of row b follows `ids[b, : lengths[b] + i]`. `row_ids[b]`: index of row b in the call.
        """
        if not self.functions:
            return scores
        batch, width, size = scores.shape
        if not self.needs_prefix:
            nothing = ids[:, :0].repeat_interleave(width, dim=0)
            return self.functions(nothing, scores.reshape(-1, size)).view(batch, width, size)
        ids = ids[:, self.unseen :]
        # Length of the text before position i of row b, at index b · width + i.
        ends = [n + i - self.unseen for n in lengths for i in range(width)]
        order = sorted(range(len(ends)), key=ends.__getitem__)
        processed, rows = scores.reshape(-1, size), None
        if in_order := order == list(range(len(ends))):
            processed = processed.clone()  # processors may change it
        else:
            index = on_device(order, scores.device)
            processed, rows = processed.index_select(0, index), index // width
        groups = [(end, list(flat)) for end, flat in groupby(order, key=ends.__getitem__)]
        for processor in self.functions:
            if type(processor) in PREFIX_FREE:
                processed = processor(ids[:, :0].repeat_interleave(width, dim=0), processed)
                continue
            pieces, first = [], 0
            for end, flat in groups:
                some, texts = slice(first, first + len(flat)), ids[:, :end]
                first += len(flat)
                if len(flat) < batch:
                    b = flat[0] // width  # adjacent rows form a slice
                    if rows is None or len(flat) == 1:
                        texts = texts[b : b + len(flat)]
                    else:
                        texts = texts.index_select(0, rows[some])
                pieces.append(self._function(processor, texts, [row_ids[k // width] for k in flat], processed[some]))
            processed = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if not in_order:
            processed = torch.empty_like(processed).index_copy_(0, index, processed)
        return processed.view(batch, width, size)

    def step(
        self,
        ids: torch.Tensor,
        lengths: Sequence[int],
        row_ids: Sequence[int],
        length: int,
        here: Sequence[int],
        scores: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all processors on `scores` (n, V), which follow the first `length` ids of the rows `here`.

        They are changed in place. `ids`, `lengths`, `row_ids` as in a call of this object. Returns the scores, and (n,)
        bool: whether a processor, other than by cutting unlikely tokens off, forbids the token in column `length`.
        """
        shown = torch.tensor(self._stand_ins(lengths, row_ids, length, here), device=ids.device)
        texts, row_indices = ids[list(here), self.unseen : length], [row_ids[b] for b in here]
        following = ids[list(here), length : length + 1]
        following = following if following.shape[1] else torch.zeros_like(texts[:, :1])
        forbidden = torch.zeros(len(here), dtype=torch.bool, device=ids.device)
        for processor in self.processors:
            allowed = scores.gather(1, following)[:, 0] > float("-inf")
            if is_function(processor) or type(processor) is PrefixConstrainedLogitsProcessor:
                with self._watching(processor):
                    scores = self._function(processor, texts, row_indices, scores)
            else:
                batch_index = {row_id: k for k, row_id in enumerate(row_indices)}
                full = scores[[batch_index.get(row_id, 0) for row_id in range(self.batch)]]  # (rows of the call, V)
                with self._watching(processor):
                    processed = processor(ids[shown, self.unseen : length], full)
                if getattr(processed, "shape", None) != full.shape:  # fewer columns would count for all tokens
                    raise ValueError(
                        f"logits_processor: {name_of(processor)} must return scores of shape {list(full.shape)}, "
                        f"got {list(processed.shape) if isinstance(processed, torch.Tensor) else one_line(processed)}"
                    )
                scores = processed[row_indices].to(scores.dtype)
            if type(processor) not in WARPERS:
                forbidden |= allowed & (scores.gather(1, following)[:, 0] == float("-inf"))
        self._may_begin = False
        return scores, forbidden

    def _watching(self, processor: Any) -> AbstractContextManager[None]:
        serves_several = any(processor is other for other in self.shared)
        if is_function(processor) or self._may_begin or not (serves_several or self.watches_numbers):
            return nullcontext()
        more = way_out(processor, ONE_EACH)
        return refuse_state("logits_processor", processor, more, serves_several, self.watches_numbers)

    def _stand_ins(
        self, lengths: Sequence[int], row_ids: Sequence[int], length: int, here: Sequence[int]
    ) -> list[int]:
        """Choose the row whose text is shown for each of the call's rows: a row that is not `here` shows its text if
        that is long enough.

        Else that of `here[0]`: a processor may fail on a text that was never written.
        """
        shown = [here[0]] * self.batch
        for b, row in enumerate(row_ids):
            if b in here or lengths[b] >= length:
                shown[row] = b
        return shown

    def _function(
        self, processor: LogitsProcessor, ids: torch.Tensor, here: Sequence[int], scores: torch.Tensor
    ) -> torch.Tensor:
        """Run a Transformers processor on `scores` (n, V) after `ids` (n, length), the texts of the call's rows
        `here`."""
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


class RowProcessing(Processing):
    """The processors of a call whose rows join and leave: a row has the call's list or a separate one."""

    def __init__(self, first: Processing, slots: int):
        """`first`: the processing of a row with the call's list. `slots`: the call's maximum of rows."""
        super().__init__(first.processors, slots)
        self.members = [first] * slots

    def insert(self, row_id: int, member: Processing) -> None:
        """Give row `row_id` the processors of `member`, which has one row."""
        self.members[row_id] = member
        self.apart |= member.processors is not self.processors
        self.needs_prefix |= member.needs_prefix
        self.is_empty &= member.is_empty
        self.runs_callers_code |= member.runs_callers_code
        self.may_forbid |= member.may_forbid

    def __call__(
        self, ids: torch.Tensor, lengths: Sequence[int], scores: torch.Tensor, row_ids: Sequence[int]
    ) -> torch.Tensor:
        if not self.apart:
            return super().__call__(ids, lengths, scores, row_ids)
        rows = [
            self.members[row_id](ids[b : b + 1], lengths[b : b + 1], scores[b : b + 1], [0])
            for b, row_id in enumerate(row_ids)
        ]
        return torch.cat(rows)

    def step(
        self,
        ids: torch.Tensor,
        lengths: Sequence[int],
        row_ids: Sequence[int],
        length: int,
        here: Sequence[int],
        scores: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [
            self.members[row_ids[b]].step(ids[b : b + 1], [lengths[b]], [0], length, [0], scores[k : k + 1])
            for k, b in enumerate(here)
        ]
        return torch.cat([scores for scores, _ in rows]), torch.cat([forbidden for _, forbidden in rows])


def refuse_unknown(processors: Iterable[object], why: str) -> None:
    """Raise `ValueError` for a processor that is no known function of text and scores."""
    for processor in processors:
        if not is_function(processor):
            raise ValueError(
                f"logits_processor: {name_of(processor)} may remember something from token to token, and {why}"
            )
