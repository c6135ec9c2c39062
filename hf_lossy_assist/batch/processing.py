"""Logits processors over a whole block at once, each position with the prefix that belongs to it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


# These look at the scores alone, so one call does for all rows and positions. No subclass: it may read the text.
PREFIX_FREE = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    SuppressTokensLogitsProcessor,
)
# These keep something for each row of a batch.
FOR_EACH_ROW = (
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
)


PACKAGE = __name__.partition(".")[0]


def from_transformers(callback: Any) -> bool:
    """True for an object of a class of Transformers' own, False for one of a subclass or of the caller's."""
    return type(callback).__module__.startswith("transformers.")


def reads_one_text(criterion: Any) -> bool:
    """True for a criterion that keeps nothing and reads each row by itself: Transformers' own, and this package's."""
    return from_transformers(criterion) or type(criterion).__module__.partition(".")[0] == PACKAGE


def runs_callers_code(processor: Any) -> bool:
    """True for a processor that is the caller's, or a grammar that asks a function of the caller's."""
    return not from_transformers(processor) or type(processor) is PrefixConstrainedLogitsProcessor


def for_row(processor: Any, row: int, batch: int) -> Any:
    """A processor that `keeps_rows` for row `row` of `batch` alone."""
    own, kind = copy.copy(processor), type(processor)
    if kind is PrefixConstrainedLogitsProcessor:
        allowed, own._num_beams = own._prefix_allowed_tokens_fn, 1
        own._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    elif kind is RepetitionPenaltyLogitsProcessor:
        own.prompt_ignore_length = own.prompt_ignore_length[row : row + 1]
    elif kind is EncoderRepetitionPenaltyLogitsProcessor:
        prompt = row * own.encoder_input_ids.shape[0] // batch  # one for all `num_return_sequences` of it
        own.encoder_input_ids = own.encoder_input_ids[prompt : prompt + 1]
    else:
        prompt = row * own.batch_size // batch
        own.batch_size, own.generated_ngrams = 1, own.generated_ngrams[prompt : prompt + 1]
    return own


def without_callers(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those of `processors` that run no code of the caller's."""
    return LogitsProcessorList([p for p in processors if not runs_callers_code(p)])


def keeps_rows(processor: Any) -> bool:
    """True for a processor of Transformers' that keeps something for each row of a batch."""
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return isinstance(processor.prompt_ignore_length, torch.Tensor)
    return type(processor) in FOR_EACH_ROW


class Processing:
    """A `LogitsProcessorList` over rows of different length.

    A processor of the caller's is a function of `input_ids` and `scores`. It is called with as many rows as the call has, each in
    its place, as `generate` calls it, so it may keep something for each of them.
    """

    # Made for one text among others: another text's may be others.
    apart = False

    def __init__(self, processors: LogitsProcessorList, batch: int):
        """`batch`: how many rows the call has."""
        self.processors, self.batch = processors, batch
        self._of_rows: dict[tuple[int, int], Any] = {}
        self._tried: set[int] = set()
        self.needs_prefix = not all(type(p) in PREFIX_FREE for p in processors)
        self.runs_callers_code = any(runs_callers_code(p) for p in processors)

    def __call__(
        self,
        ids: torch.Tensor,
        lengths: Sequence[int],
        scores: torch.Tensor,
        index: Sequence[int],
        open_places: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Process `scores` (B, Q, V) float32, where position i of row b follows `ids[b, : lengths[b] + i]`; → (B, Q, V).

        `index[b]`: which row of the call row b is. `open_places[b]`: at how many positions of row b, from the first, a token can
        still be committed; None: at all. The caller's code is not asked about others, nor behind a token that it forbids: a
        grammar has no answer there.
        """
        if not self.processors:
            return scores
        batch, width, size = scores.shape
        if not self.needs_prefix:
            nothing = ids[:, :0].repeat_interleave(width, dim=0)
            return self.processors(nothing, scores.reshape(-1, size)).view(batch, width, size)
        out, still_open = scores.clone(), [width] * batch if open_places is None else list(open_places)
        for length in sorted({n + i for n in set(lengths) for i in range(width)}):
            rows = [b for b, n in enumerate(lengths) if 0 <= length - n < width]
            at = rows, [length - lengths[b] for b in rows]
            found = out[at]  # (n, V), a copy
            for processor in self.processors:
                if not runs_callers_code(processor):
                    found = self._by_row(processor, ids[:, :length], rows, index, found)
                    continue
                asked = [k for k, (b, place) in enumerate(zip(*at, strict=True)) if place < still_open[b]]
                if not asked:
                    continue
                texts, theirs = Texts(ids, lengths, index, length), [rows[k] for k in asked]
                found[asked] = processed = self._callers(processor, texts, theirs, found[asked]).to(found.dtype)
                if width > 1:
                    for b in texts.forbidden(theirs, processed):
                        still_open[b] = min(still_open[b], length - lengths[b] + 1)
            out[at] = found
        return out

    def _by_row(
        self, processor: Any, texts: torch.Tensor, rows: Sequence[int], index: Sequence[int], scores: torch.Tensor
    ) -> torch.Tensor:
        """A processor of Transformers' on `scores` (n, V), which follow `texts[rows]`, (n, length)."""
        here = [index[b] for b in rows]
        texts = texts if len(rows) == len(texts) else texts[rows]
        if here == list(range(self.batch)) or not keeps_rows(processor):
            return processor(texts, scores)
        out = []
        for k, row in enumerate(here):
            key = (id(processor), row)
            if key not in self._of_rows:
                self._of_rows[key] = for_row(processor, row, self.batch)
            out.append(self._of_rows[key](texts[k : k + 1], scores[k : k + 1]))
        return torch.cat(out)

    def _callers(self, processor: Any, texts: "Texts", rows: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """A processor of the caller's on `scores` (n, V), which follow the texts of `rows`."""
        if type(processor) is PrefixConstrainedLogitsProcessor:
            return self._by_row(processor, texts.ids[:, : texts.length], rows, texts.index, scores)
        stands, order = texts.of_call(rows, self.batch)
        place = {b: k for k, b in enumerate(rows)}
        theirs = scores[[place.get(b, 0) for b in stands]]  # (rows of the call, V)
        inputs = texts.ids[stands, : texts.length], theirs
        if id(processor) not in self._tried:
            self._tried.add(id(processor))
            refuse_stateful(processor, *inputs)
        return checked(processor, *inputs)[order]


@dataclass(frozen=True)
class Texts:
    """The first `length` tokens of rows that hold `lengths[b]` and drafts behind them; `index[b]`: the row of the call."""

    ids: torch.Tensor  # (B, ≥ length)
    lengths: Sequence[int]
    index: Sequence[int]
    length: int

    def forbidden(self, rows: Sequence[int], scores: torch.Tensor) -> list[int]:
        """Those of `rows` whose next token, a drafted one, has no chance by `scores` (n, V)."""
        behind = self.ids[rows, self.length : self.length + 1]
        if behind.shape[1] == 0:
            return []
        never = (scores.gather(1, behind)[:, 0] == float("-inf")).tolist()
        return [b for b, forbidden in zip(rows, never, strict=True) if forbidden]

    def of_call(self, rows: Sequence[int], batch: int) -> tuple[list[int], list[int]]:
        """Which b's text stands in each of `batch` rows of the call, and the rows of the call at which those of `rows` stand.

        A row that is not asked about shows its own text where that is long enough, and else that of the first of `rows`: a
        processor may know no answer to a text that nobody wrote.
        """
        stands, asked = [rows[0]] * batch, set(rows)
        for b, (row, held) in enumerate(zip(self.index, self.lengths, strict=True)):
            if b in asked or held >= self.length:
                stands[row] = b
        return stands, [self.index[b] for b in rows]


def checked(processor: Any, texts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """What `processor` makes of copies of `scores` (B, V), of the same shape. Raises `ValueError` for another."""
    out = processor(texts, scores.clone())
    if not isinstance(out, torch.Tensor) or out.shape != scores.shape:
        found = f"a tensor of shape {list(out.shape)}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
        raise ValueError(
            f"logits_processor: {type(processor).__name__} must return scores of the shape that it was given, "
            f"{list(scores.shape)}, and returned {found}: return one row for each row of scores"
        )
    return out


def refuse_stateful(processor: Any, texts: torch.Tensor, scores: torch.Tensor) -> None:
    """Refuse a processor that answers one question in two ways: blocks ask about a place more than once, and about drafts.

    Torch's random numbers are the same in both calls, and afterwards as they were. Raises `ValueError`.
    """
    devices = [scores.device] if scores.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        first = checked(processor, texts, scores)
    with torch.random.fork_rng(devices):
        second = checked(processor, texts, scores)
    if not torch.allclose(first, second, equal_nan=True):
        raise ValueError(
            f"logits_processor: {type(processor).__name__} changed its answer when it was asked twice about the same text, and blocks "
            "ask in another order than one token at a time: make it a function of input_ids and scores, or leave lossy_policy out"
        )
