"""The texts of a call: what has been written, what is finished, and the check of every stop condition at every token."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from ..validation import renamed
from .memories import Memories, checked_answer
from .processor_kinds import reads_one_text


STEP = 256  # new tokens that there is room for at first; then storage doubles


class Rows:
    """Token ids in the layout of `generate`: left padding, prompt, new tokens; and how far each row has come.

    `row_ids` (B,) int64 are the rows' numbers in the call, `row_id_list` the same on the host: `select` drops finished rows.
    """

    order, index, texts = renamed("row_ids"), renamed("row_id_list"), renamed("token_ids")

    def __init__(
        self,
        input_ids: torch.Tensor,
        pads: Sequence[int],
        criteria: StoppingCriteriaList,
        max_length: int,
        columns: torch.Tensor | None = None,
    ):
        """`input_ids` (B, width) with `pads[b]` hidden tokens: on the left of row b, or in its first ones of `columns`.

        `columns` (B, width) int64: where each row's tokens stand, the hidden ones first. No model is fed a hidden token; processors
        and criteria see them, as in `generate`.
        """
        batch, self.width = input_ids.shape
        self.criteria = criteria
        # A caller's own MaxLengthCriteria takes the place of the generation config's, longer or shorter, which is among `criteria` else.
        # As criteria are asked behind a token, one token is written whatever they say.
        longest = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=max_length)
        self.max_length = max(longest, self.width + 1)
        self.ids = input_ids.to(torch.int64, copy=True)
        self._make_room(self.width + STEP)
        self.row_id_list = list(range(batch))
        self.row_ids = torch.arange(batch, device=self.ids.device)  # the same on the device
        self.pads, self.lengths = list(pads), [self.width] * batch
        self.prompt_lengths, self.max_lengths = (
            [self.width] * batch,
            [self.max_length] * batch,
        )  # of new tokens; a row's last length
        self._columns = columns
        self.token_types: torch.Tensor | None = (
            None  # (B, n): token types of the prompts without hidden tokens, where a call has them
        )
        self.multimodal: Any = None  # what the models are given beside the text, where a call has more than text
        self.finished = [False] * batch
        self.finished_tokens: list[torch.Tensor | None] = [None] * batch  # (new tokens,) of each dropped row
        self.eos = {t for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.tolist()}
        self._eos = torch.tensor(sorted(self.eos), device=self.ids.device)
        self._clocks = [c for c in criteria if type(c) is MaxTimeCriteria]
        known = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)  # no subclass: it may stop elsewhere
        self._others = StoppingCriteriaList([c for c in criteria if type(c) not in known])
        self._memories = Memories(self._others, batch)
        self.runs_callers_code = not all(reads_one_text(c) for c in self._others)
        self.keeps_scores = (
            False  # as with `output_scores`: criteria are then shown a row's scores so far, and else None
        )
        self._scores: list[list[torch.Tensor]] = [
            [] for _ in range(batch)
        ]  # (1, V) of each new token of each row of the call
        # Where no criterion knows an end token, `generate` has no padding: rows that have ended are written on until all have.
        self.writes_past_end = batch > 1 and not any(hasattr(c, "eos_token_id") for c in criteria)
        self._ended: list[int | None] = [
            None
        ] * batch  # the length at which each row of the call ended, where they are written on

    def _make_room(self, length: int) -> None:
        """Have columns for rows of `length` tokens; a far `max_length` costs nothing until it is reached."""
        # One more column than is ever kept: a correction is written before its row is known to be full.
        (batch, columns), limit = self.ids.shape, self.max_length + 1
        if columns < min(length, limit):
            grown = self.ids.new_zeros(batch, min(limit, max(length, 2 * columns)))
            grown[:, :columns] = self.ids
            self.ids = grown

    @property
    def unfinished(self) -> bool:
        return not all(self.finished)

    @property
    def has_holes(self) -> bool:
        """True where a row's mask hides more than padding on its left."""
        return self._columns is not None

    def token_ids(self) -> list[torch.Tensor]:
        """Each row's text so far without padding, (n,)."""
        if self._columns is None:
            return [self.ids[b, pad:n] for b, (pad, n) in enumerate(zip(self.pads, self.lengths, strict=True))]
        seen = self.visible(self.ids)
        return [torch.cat([old, self.ids[b, self.width : self.lengths[b]]]) for b, old in enumerate(seen)]

    def new_tokens(self, b: int) -> torch.Tensor:
        """What row b has written so far, (n,)."""
        return self.ids[b, self.prompt_lengths[b] : self.lengths[b]]

    def visible(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Of `values` (B, ≥ width), one for each token of the prompts, those of tokens that are not hidden: (n,) of each row."""
        if self._columns is None:
            return [values[b, pad : self.width] for b, pad in enumerate(self.pads)]
        return [values[b, self._columns[b, pad:]] for b, pad in enumerate(self.pads)]

    def cached_lengths(self) -> list[int]:
        """How many tokens a cache should hold of each row: all but the last, which starts the next forward."""
        return [length - pad - 1 for length, pad in zip(self.lengths, self.pads, strict=True)]

    def budgets(self) -> list[int]:
        """How many tokens each row may still draft: one place is left for the target's own token; finished rows none."""
        return [
            0 if f else full - n - 1 for n, full, f in zip(self.lengths, self.max_lengths, self.finished, strict=True)
        ]

    def active_positions(self, drafted: torch.Tensor, counts: Sequence[int]) -> list[int]:
        """At how many places of each row a token can still be committed, if the first `counts[b]` of `drafted` (B, γ) stand behind it."""
        before_end = (self.is_end_token(drafted).long().cumsum(dim=1) == 0).sum(dim=1).tolist()
        rooms = [
            0 if f else full - n for n, full, f in zip(self.lengths, self.max_lengths, self.finished, strict=True)
        ]
        return [min(n + 1, end + 1, room) for n, end, room in zip(counts, before_end, rooms, strict=True)]

    def uncached_tokens(self, held: Sequence[int], written: int = 0) -> tuple[torch.Tensor, list[int]]:
        """The tokens behind each row's first `held[b]` ones, with `written` more than are part of it.

        Returns (B, Q) padded on the right, and how many of them are real.
        """
        starts = [h + pad for h, pad in zip(held, self.pads, strict=True)]
        counts = [length - start + written for length, start in zip(self.lengths, starts, strict=True)]
        mixed = (
            self._columns is not None and min(starts) < self.width
        )  # hidden tokens between those that are asked for
        if len(set(starts)) == 1 and len(set(counts)) == 1 and not mixed:
            return self.ids[:, starts[0] : self.lengths[0] + written], counts
        columns = (
            torch.arange(max(counts), device=self.ids.device) + torch.tensor(starts, device=self.ids.device)[:, None]
        )
        if self._columns is not None and mixed:
            columns = torch.where(
                columns < self.width, self._columns.gather(1, columns.clamp(max=self.width - 1)), columns
            )
        return self.ids.gather(1, columns.clamp(max=self.ids.shape[1] - 1)), counts

    def is_end_token(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which of `tokens` are end tokens, of the same shape, bool."""
        if len(self._eos) == 1:
            return tokens == self._eos
        return torch.isin(tokens, self._eos)

    def write(self, tokens: torch.Tensor, offset: torch.Tensor | int = 0) -> None:
        """Put `tokens` (B, k) behind each row's text, `offset` (B,) places further, without making them part of it.

        A tensor's offsets lie within what an earlier call wrote behind the same texts: it is not looked at.
        """
        further = tokens.shape[1] + offset if isinstance(offset, int) else 0
        self._make_room(max(self.lengths) + further + 1)
        if isinstance(offset, int) and len(set(self.lengths)) == 1:
            room = self.ids[:, self.lengths[0] + offset :][:, : tokens.shape[1]]
            room.copy_(tokens[:, : room.shape[1]])
            return
        columns = torch.tensor(self.lengths, device=self.ids.device) + offset
        columns = columns[:, None] + torch.arange(tokens.shape[1], device=self.ids.device)
        self.ids.scatter_(1, columns.clamp(max=self.ids.shape[1] - 1), tokens)

    def write_at(self, tokens: torch.Tensor, places: torch.Tensor) -> None:
        """`write` at columns `places` (B,) … of each row, which lie behind its text: nothing is uploaded."""
        self._make_room(max(self.lengths) + tokens.shape[1] + 1)
        columns = places[:, None] + torch.arange(tokens.shape[1], device=self.ids.device)
        self.ids.scatter_(1, columns.clamp(max=self.ids.shape[1] - 1), tokens)

    def commit(self, row: int, tokens: Sequence[int], scores: torch.Tensor | None) -> int:
        """Make `tokens`, already written, part of a row, up to the first one that ends it; returns how many were taken.

        `scores` (≥ tokens, V) are the processed target scores that the tokens were judged by, for criteria that look at them; None: the
        call keeps none.
        """
        start, number = self.lengths[row], self.row_id_list[row]
        for i, token in enumerate(tokens):
            length = start + i + 1
            if self._others and self.keeps_scores and scores is not None:
                self._scores[number].append(scores[i : i + 1])
            full = length >= self.max_lengths[row]
            stop = self._ended[number] is None and (self._criteria_stop(row, length) or token in self.eos)
            if self.writes_past_end and (stop or full) and self._ended[number] is None:
                self._ended[number] = length
            if full or (stop and not self.writes_past_end):
                self.finished[row] = True
                break
        self.lengths[row] = start + i + 1
        if self.writes_past_end and all(self._ended):
            self._cut(max(n for n in self._ended if n is not None))
        return i + 1

    def _criteria_stop(self, row: int, length: int) -> bool:
        """What criteria beyond the known ones say of a row's first `length` tokens.

        One of the caller's is shown them in the place of every row of the call, as it may keep something for each (`Memories`).
        """
        stop = False
        for criterion in self._others:
            shown = 1 if reads_one_text(criterion) else len(self.finished_tokens)
            scores = (
                tuple(s.expand(shown, -1) for s in self._scores[self.row_id_list[row]]) if self.keeps_scores else None
            )
            with self._memories.of(criterion, self.row_id_list[row]) if shown > 1 else nullcontext():
                answer = criterion(self.ids[row : row + 1, :length].expand(shown, -1), scores)
            said = checked_answer(criterion, answer, shown)
            stop |= bool(said.expand(shown)[self.row_id_list[row] if shown > 1 else 0])
        return stop

    def _cut(self, length: int) -> None:
        """End every row that has `length` tokens; what some have beyond is dropped in the end."""
        self.max_length, self.max_lengths = length, [length] * len(self.max_lengths)
        self.finished = [n >= length for n in self.lengths]

    def is_out_of_time(self) -> bool:
        """Whether `max_time` is over."""
        return any(bool(c(self.ids[:1], None).any()) for c in self._clocks)

    def check_time(self) -> None:
        """End every row when `max_time` is over; asked once a round."""
        if self.is_out_of_time():
            if self.writes_past_end:  # to rows of one length, as `generate` has them
                self._cut(min(self.lengths))
            self.finished = [True] * len(self.finished)

    def select(self, keep: Sequence[int]) -> None:
        """Keep these rows (all others are finished) and put the texts of the others aside."""
        for b, row in enumerate(self.row_id_list):
            if b not in keep:
                self.finished_tokens[row] = self.new_tokens(b).clone()
        rows = torch.tensor(keep, dtype=torch.long, device=self.ids.device)
        self.ids, self.row_ids = self.ids[rows], self.row_ids[rows]
        if self._columns is not None:
            self._columns = self._columns[rows]
        for name in ("row_id_list", "pads", "lengths", "prompt_lengths", "max_lengths", "finished"):
            setattr(self, name, [getattr(self, name)[b] for b in keep])

    def sequences(self, prompt: torch.Tensor, pad: int) -> torch.Tensor:
        """Prompt and new tokens of all rows as `generate` returns them, short rows padded on the right."""
        self.select([])
        new = torch.nn.utils.rnn.pad_sequence(
            [d[: self.max_length - self.width] for d in self.finished_tokens if d is not None],
            batch_first=True,
            padding_value=pad,
        )
        return torch.cat([prompt, new], dim=1)
