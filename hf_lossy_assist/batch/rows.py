"""The texts of a call: tokens, finished rows, and stopping criteria checked at every token."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from ..tensors import on_device
from .callers_code import is_callers_criterion
from .criteria import KNOWN, BatchCriteria, RowEnds, ends_at, is_over
from .suffix_memory import SuffixMemory


if TYPE_CHECKING:
    from ..models.multimodal import Prompt

STEP = 256  # new tokens allocated at first; then storage doubles


class Rows:
    """Token ids in the layout of `generate` (left padding, prompt, new tokens), and each row's progress.

    `row_ids` (B,) int64 are the rows' indices in the call, `row_id_list` the same on the host; `select` drops finished
    rows.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        pads: Sequence[int],
        criteria: StoppingCriteriaList,
        max_length: int,
        shown: torch.Tensor | None = None,
        unseen: int = 0,
        pad: int = 0,
    ):
        """`input_ids` (B, width), of which row b has `pads[b]` hidden tokens, on the left.

        Models never read hidden tokens; processors and criteria do, as in `generate`. `shown` (B, width): the prompts
        as these see them, if tokens were hidden between others. The first `unseen` columns stand for embeddings without
        ids: `max_length` does not count them, and criteria do not see them. `pad`: the token that `generate` writes
        after a row's end.
        """
        batch, self.width = input_ids.shape
        self.unseen, self._shown = unseen, shown
        # (B, width): the attention mask in the caller's columns, if some are masked.
        self.mask: torch.Tensor | None = None
        self.unknown: torch.Tensor | None = None  # (B, width) bool: embeddings that belong to no token
        self.moved = False  # the columns are in another order than the caller's
        self.criteria = criteria
        # A caller's MaxLengthCriteria replaces the generation config's, which is otherwise among `criteria`. Criteria
        # are evaluated after a token is written, so there is always one.
        longest = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=max_length)
        self.max_length = max(longest + unseen, self.width + 1)
        self._made_for = next((c for c in criteria if getattr(c, "max_position_embeddings", None) is not None), None)
        self.ids = input_ids.to(torch.int64, copy=True)
        self._make_room(self.width + STEP)
        self.row_id_list = list(range(batch))
        self.row_ids = torch.arange(batch, device=self.ids.device)
        self.pads, self.lengths = list(pads), [self.width] * batch
        self.prompt_lengths, self.max_lengths = [self.width] * batch, [self.max_length] * batch
        self.multimodal: Prompt | None = None  # the prompts, if they are more than text
        self.finished = [False] * batch
        self.finished_tokens: list[torch.Tensor | None] = [None] * batch  # (new tokens,) of each dropped row
        self.eos = {t for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.tolist()}
        self._eos = torch.tensor(sorted(self.eos), device=self.ids.device)
        self._texts: dict[int, list[int]] = {}  # host copies by row id, for rows that were read
        self.memories: dict[int, Sequence[SuffixMemory]] = {}  # by row id: texts beside its text to draft from
        self._clocks = [c for c in criteria if type(c) is MaxTimeCriteria]
        others = [c for c in criteria if type(c) not in KNOWN]
        callers = [c for c in others if is_callers_criterion(c)]
        self.runs_callers_code = bool(callers)
        # Criteria that a row is judged by as it gets a token. The caller's are asked about all rows together.
        self._others = [c for c in others if batch == 1 or not is_callers_criterion(c)]
        # Set with `output_scores`: criteria then get a row's scores, (1, V) of each new token, else None.
        self.keeps_scores = False
        self._scores: list[list[torch.Tensor]] = [[] for _ in range(batch)]
        # Answers of criteria about tokens before their commit, by row id and length.
        self._judged: dict[tuple[int, int], bool] = {}
        # Without an end token `generate` cannot pad: finished rows are continued until all have finished.
        self.writes_past_end = batch > 1 and not any(hasattr(c, "eos_token_id") for c in criteria)
        # By row id: new tokens at the end, if rows may be continued there.
        self._ended: list[int | None] = [None] * batch
        self._together: BatchCriteria | None = None
        if callers and batch > 1:
            prompts = self.shown_ids[:, unseen : self.width]
            self._together = BatchCriteria(callers, prompts, None if self.writes_past_end else pad)
        self._stopped = set[int]()  # row ids of texts that an end token or a criterion ended, not a limit
        self._inserted: dict[int, RowEnds] = {}  # by row id

    def _make_room(self, length: int) -> None:
        """Grow to at least `length` columns, at most `max_length + 1`."""
        # One spare column: a correction is written before its row is known to be full.
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
        """Return whether tokens were hidden between others."""
        return self._shown is not None

    @property
    def shown_ids(self) -> torch.Tensor:
        """`ids` as processors and criteria see them: hidden tokens are where the caller put them."""
        return self.ids if self._shown is None else torch.cat([self._shown, self.ids[:, self.width :]], dim=1)

    def token_ids(self) -> list[torch.Tensor]:
        """Return each row's text without hidden tokens, (n,)."""
        return [ids[pad:length] for ids, pad, length in zip(self.ids, self.pads, self.lengths, strict=True)]

    def new_tokens(self, b: int) -> torch.Tensor:
        """Return the new tokens of row b, (n,)."""
        return self.ids[b, self.prompt_lengths[b] : self.lengths[b]]

    def finish_reason(self, b: int) -> str:
        """Return "stop" if an end token or a criterion ended row b, "length" if a limit did."""
        return "stop" if self.row_id_list[b] in self._stopped else "length"

    def text_on_host(self, b: int) -> list[int]:
        """Return row b's text without hidden tokens, not to be modified.

        The device is read once, for all rows; inserted prompts are known, and later tokens from `commit`.
        """
        row_id = self.row_id_list[b]
        if row_id not in self._texts:
            texts = self.ids[:, : max(self.lengths)].tolist()
            for i, row in enumerate(self.row_id_list):
                self._texts.setdefault(row, texts[i][self.pads[i] : self.lengths[i]])
        return self._texts[row_id]

    def cached_lengths(self) -> list[int]:
        """Count the tokens of each row that belong in a cache: all but the last, which starts the next forward."""
        return [length - pad - 1 for length, pad in zip(self.lengths, self.pads, strict=True)]

    def budgets(self) -> list[int]:
        """Count the tokens that each row may draft: one position is reserved for the target's token;
        0 for finished rows."""
        rows = zip(self.lengths, self.max_lengths, self.finished, strict=True)
        return [0 if finished else max(longest - length - 1, 0) for length, longest, finished in rows]

    def uncached_tokens(self, cached: Sequence[int], written: int = 0) -> tuple[torch.Tensor, list[int]]:
        """Return the tokens after each row's first `cached[b]`, including `written` tokens that are not committed yet.

        The tokens are (B, Q), padded on the right; the list counts the real ones.
        """
        starts = [n + pad for n, pad in zip(cached, self.pads, strict=True)]
        counts = [length - start + written for length, start in zip(self.lengths, starts, strict=True)]
        if len(set(starts)) == 1 and len(set(counts)) == 1:
            return self.ids[:, starts[0] : self.lengths[0] + written], counts
        device = self.ids.device
        columns = torch.arange(max(counts), device=device) + on_device(starts, device)[:, None]
        return self.ids.gather(1, columns.clamp(max=self.ids.shape[1] - 1)), counts

    def is_end_token(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which of `tokens` are end tokens, bool of the same shape."""
        return tokens == self._eos if len(self._eos) == 1 else torch.isin(tokens, self._eos)

    def write(self, tokens: torch.Tensor, offset: torch.Tensor | int = 0) -> None:
        """Write `tokens` (B, k) after each row's text, `offset` (an int or (B,)) positions further, without committing
        them.

        A tensor's offsets must lie within what an earlier call wrote after the same texts: they are not checked.
        """
        further = tokens.shape[1] + offset if isinstance(offset, int) else 0
        self._make_room(max(self.lengths) + further + 1)
        if len(set(self.lengths)) > 1:
            self.write_at(tokens, on_device(self.lengths, self.ids.device) + offset)
        elif isinstance(offset, torch.Tensor):
            self.write_at(tokens, self.lengths[0] + offset)
        else:
            room = self.ids[:, self.lengths[0] + offset :][:, : tokens.shape[1]]
            room.copy_(tokens[:, : room.shape[1]])

    def write_at(self, tokens: torch.Tensor, starts: torch.Tensor) -> None:
        """Write from column `starts` (B,) of each row, which follows its text; needs no upload."""
        self._make_room(max(self.lengths) + tokens.shape[1] + 1)
        columns = starts[:, None] + torch.arange(tokens.shape[1], device=self.ids.device)
        self.ids.scatter_(1, columns.clamp(max=self.ids.shape[1] - 1), tokens)

    def commit(self, row: int, tokens: Sequence[int], scores: torch.Tensor | None) -> int:
        """Commit `tokens`, already written, up to the first that ends the row; return how many were committed.

        `scores` (≥ tokens, V): the target's processed scores of the tokens; None if the call does not keep them.
        """
        start, row_id = self.lengths[row], self.row_id_list[row]
        for i, token in enumerate(tokens):
            length = start + i + 1
            full = length >= self.max_lengths[row]
            self._keep_scores(row, length, scores, i)
            stop = self._ended[row_id] is None and (self._criteria_stop(row, length) or token in self.eos)
            self._judged.pop((row_id, length), None)
            if stop:
                self._stopped.add(row_id)
            if self.continues and (stop or full) and self._ended[row_id] is None:
                self._ended[row_id] = length - self.width
            if full or (stop and not self.writes_past_end):
                self.finished[row] = True
                break
        self.lengths[row] = start + i + 1
        if self._made_for is not None and self.lengths[row] - self.unseen > self._made_for.max_position_embeddings:
            text = self.shown_ids[row : row + 1, self.unseen :]
            self._made_for(text[:, : self._made_for.max_position_embeddings + 1], None)  # Transformers warns, once
            self._made_for = None
        if row_id in self._texts:
            self._texts[row_id] += tokens[: i + 1]
        if self._together is not None:
            self._together.tokens[row_id] += tokens[: i + 1]
        self._cut_together()
        return i + 1

    @property
    def continues(self) -> bool:
        """Whether rows may be written on after their ends, which `ends` has."""
        return self.writes_past_end or self._together is not None

    def ends(self) -> list[int]:
        """Return the length of each row of the call, at most, of prompt and text."""
        alone = self._together is not None and not self.writes_past_end
        return [self.max_length if n is None or not alone else self.width + n for n in self._ended]

    def _cut_together(self) -> None:
        """End all rows with the last one, if finished rows are continued until then."""
        if self.writes_past_end and all(self._ended):
            self.cut(self.width + max(n for n in self._ended if n is not None))

    def ends_at(self, row: int, length: int, scores: torch.Tensor) -> bool:
        """Return whether a row's text, if its first `length` tokens were committed, would end there, before they are.

        `scores` (≥ tokens, V): as in `commit`, which asks no criterion about these tokens again.
        """
        self._keep_scores(row, length, scores, length - self.lengths[row] - 1)
        stop = self._judged[self.row_id_list[row], length] = self._criteria_stop(row, length)
        return stop or int(self.ids[row, length - 1]) in self.eos

    def _keep_scores(self, row: int, length: int, scores: torch.Tensor | None, i: int) -> None:
        """Keep `scores[i]` for the criteria, those of the last of a row's first `length` tokens."""
        scores_so_far = self._scores[self.row_id_list[row]]
        if self.keeps_scores and scores is not None and (self._others or self._together):
            scores_so_far += [scores[i : i + 1].clone()] if len(scores_so_far) < length - self.width else []

    def _criteria_stop(self, row: int, length: int) -> bool:
        """Call the criteria of a row alone, but for those in `KNOWN`, on its first `length` tokens, once."""
        row_id = self.row_id_list[row]
        inserted = self._inserted.get(row_id)
        others = self._others if inserted is None else inserted.others
        scores = self._scores[row_id] if self.keeps_scores and inserted is None else None
        if (row_id, length) in self._judged:
            return self._judged[row_id, length]
        return bool(others) and ends_at(others, self.shown_ids[row : row + 1, self.unseen : length], scores)[0]

    def cut(self, length: int) -> None:
        """End every row that has `length` tokens; `sequences` drops tokens beyond."""
        self.max_length, self.max_lengths = length, [length] * len(self.max_lengths)
        self.finished = [n >= length for n in self.lengths]

    def check_time(self) -> None:
        """End every row when `max_time` has passed, and call the criteria about all rows; called once a round."""
        if self._clocks and is_over(self._clocks):
            if self.writes_past_end:  # `generate` returns rows of equal length
                self.cut(min(self.lengths))
            self.finished = [True] * len(self.finished)
            for row_id, length in zip(self.row_id_list, self.lengths, strict=True):
                self._ended[row_id] = self._ended[row_id] or min(length, self.max_length) - self.width
        if self._together is not None:
            self._together.advance(self._ended, self._scores if self.keeps_scores else None)
            self._cut_together()
            if not self.writes_past_end:
                ended = [self._ended[row_id] is not None for row_id in self.row_id_list]
                self.finished = [over or end for over, end in zip(self.finished, ended, strict=True)]
        for b, row_id in enumerate(self.row_id_list):
            if row_id in self._inserted and self._inserted[row_id].clocks:
                self.finished[b] |= is_over(self._inserted[row_id].clocks)

    def select(self, keep: Sequence[int]) -> None:
        """Reduce the batch to these rows and store the texts of the others, which are finished."""
        for b, row in enumerate(self.row_id_list):
            if b not in keep:
                self.finished_tokens[row] = self.new_tokens(b).clone()
        rows = torch.tensor(keep, dtype=torch.long, device=self.ids.device)
        self.ids, self.row_ids = self.ids[rows], self.row_ids[rows]
        if self._shown is not None:
            self._shown = self._shown[rows]
        for name in ("row_id_list", "pads", "lengths", "prompt_lengths", "max_lengths", "finished"):
            setattr(self, name, [getattr(self, name)[b] for b in keep])

    def emptied(self, slots: int, ends: Iterable[int]) -> "Rows":
        """Return empty rows for a call with up to `slots` texts and the end tokens `ends`."""
        out = Rows(self.ids[:0, :0], [], StoppingCriteriaList(), 1)
        out.finished_tokens, out._scores = [None] * slots, [[] for _ in range(slots)]
        out._ended, out.eos = [None] * slots, set(ends)
        out._eos = torch.tensor(sorted(out.eos), device=self.ids.device)
        return out

    def insert(
        self, slots: Sequence[int], row_ids: Sequence[int], prompts: Sequence[Sequence[int]], ends: Sequence[RowEnds]
    ) -> None:
        """Put rows `row_ids` of the call, which begin with `prompts`, at batch indices `slots`, some of which may be
        new."""
        device, widths = self.ids.device, list(map(len, prompts))
        more = max(1 + max(slots) - len(self.row_id_list), 0)
        for name in ("row_id_list", "pads", "lengths", "prompt_lengths", "max_lengths", "finished"):
            getattr(self, name).extend([0] * more)
        if more:
            self.ids = torch.nn.functional.pad(self.ids, (0, 0, 0, more))
        self.max_length = max(self.max_length, *(end.max_length for end in ends))
        self._make_room(max(widths) + STEP)
        texts = [torch.tensor(prompt) for prompt in prompts]
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)
        self.ids[torch.tensor(slots, device=device), : padded.shape[1]] = padded
        for b, row_id, width, end, prompt in zip(slots, row_ids, widths, ends, prompts, strict=True):
            self.row_id_list[b], self.lengths[b], self.prompt_lengths[b] = row_id, width, width
            self.max_lengths[b], self.finished[b], self._inserted[row_id] = end.max_length, False, end
            self.runs_callers_code |= any(map(is_callers_criterion, end.others))
            self._texts[row_id] = list(prompt)
        self._stopped.difference_update(row_ids)
        self.row_ids = torch.tensor(self.row_id_list, device=device)

    def sequences(self, prompt: torch.Tensor, pad: int) -> torch.Tensor:
        """Return prompts and new tokens of all rows as `generate` does, padded on the right."""
        self.select([])
        new = torch.nn.utils.rnn.pad_sequence(
            [d[: end - self.width] for d, end in zip(self.finished_tokens, self.ends(), strict=True) if d is not None],
            batch_first=True,
            padding_value=pad,
        )
        return torch.cat([prompt, new], dim=1)
