"""Drafts without a model: what followed earlier occurrences of the text's last tokens."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..batch.logits_processing import Processing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..registry import register_drafter
from ..round import Draft, Verified
from ..stats.clock import Clock
from ..stops import StopRun
from ..validation import LONGEST_DRAFT, check_int, check_positive, shown
from .base import DraftContext, Drafter, DrafterRun, certain_draft, cut_at_end


LONGEST_MATCH = 64


class SuffixMemory:
    """Texts of earlier calls that a `SuffixDrafter` also searches: pass the same object to each call.

    Args:
        max_tokens: total over all texts; the oldest ones are dropped first.
    """

    def __init__(self, max_tokens: int = 1_000_000):
        check_int("SuffixMemory.max_tokens", max_tokens, 1)
        self.max_tokens, self.tokens = max_tokens, 0
        self.texts: OrderedDict[int, IndexedText] = OrderedDict()
        self._next = 0

    def clear(self) -> None:
        """Remove all texts."""
        self.texts.clear()
        self.tokens = 0

    def add(self, text: "IndexedText") -> None:
        """Add a finished text."""
        self.texts[self._next] = text
        self._next += 1
        self.tokens += len(text.tokens)
        while self.tokens > self.max_tokens and self.texts:
            _, oldest = self.texts.popitem(last=False)
            self.tokens -= len(oldest.tokens)


@dataclass(frozen=True)
class SuffixDrafter(Drafter):
    """Continue a row as its text, or an earlier one, continued at the last occurrence of the row's latest tokens. No draft model; any batch.

    The longest match wins, among equal ones the latest; the draft has at most `factor` times as many tokens as match (Oliaro et al.,
    SuffixDecoding, huggingface.co/papers/2411.04975, with an index of n-grams in place of a suffix tree). Tokens have q = 1, so the output has
    exactly the target's distribution. The call's stop still limits each draft.

    Args:
        min_match: tokens that must match.
        max_match: the most tokens that are compared.
        factor: drafted tokens for each matching one.
        max_draft: the most tokens of one round.
        memory (`SuffixMemory`, *optional*): texts of earlier calls, to which this call's are added.
    """

    min_match: int = 2
    max_match: int = 8
    factor: float = 2.0
    max_draft: int = 16
    memory: SuffixMemory | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_int("SuffixDrafter.min_match", self.min_match, 1, LONGEST_MATCH)
        check_int("SuffixDrafter.max_match", self.max_match, self.min_match, LONGEST_MATCH)
        check_positive("SuffixDrafter.factor", self.factor)
        check_int("SuffixDrafter.max_draft", self.max_draft, 1, LONGEST_DRAFT)
        if self.memory is not None and not isinstance(self.memory, SuffixMemory):
            raise TypeError(f"SuffixDrafter.memory: expected a SuffixMemory, got {shown(self.memory)}")

    def start(self, context: DraftContext) -> "SuffixRun":
        return SuffixRun(self, context.sampling, context.rows.eos, context.vocabulary)


class IndexedText:
    """A text with the last end position of each n-gram of `min_match` to `max_match` tokens."""

    def __init__(self, min_match: int, max_match: int):
        self.tokens: list[int] = []
        self.sizes = range(min_match, max_match + 1)
        self.ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The n-gram at the end of the text is not indexed, since nothing follows it yet."""
        for token in tokens:
            end = len(self.tokens)
            for size in self.sizes:
                if size <= end:
                    self.ends[tuple(self.tokens[end - size :])] = end
            self.tokens.append(token)

    def match(self, text: Sequence[int]) -> tuple[int, int]:
        """Return the length of the longest indexed n-gram that `text` ends with (0: none), and its end position in this text."""
        for size in reversed(self.sizes):
            if size <= len(text):
                end = self.ends.get(tuple(text[len(text) - size :]))
                if end is not None:
                    return size, end
        return 0, 0


class SuffixRun(DrafterRun):
    """The texts of one call, indexed as they grow."""

    skip_validation = True

    def __init__(self, settings: SuffixDrafter, sampling: bool, eos: set[int], vocabulary: int):
        self.settings, self.sampling, self.eos, self.vocabulary = settings, sampling, eos, vocabulary
        self.texts: dict[int, IndexedText] = {}  # by row number in the call
        self.remembered: set[int] = set()

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        self._read(rows)
        drafts = [self.draft(self.texts[row], limit) for row, limit in zip(rows.row_id_list, limits, strict=True)]
        return certain_draft(drafts, rows, limits, self.sampling)

    def _read(self, rows: Rows) -> None:
        """Index the tokens committed since the last round."""
        for b, row in enumerate(rows.row_id_list):
            if row not in self.texts:
                self.texts[row] = IndexedText(self.settings.min_match, self.settings.max_match)
            known = self.texts[row]
            known.extend(rows.text_on_host(b)[len(known.tokens) :])

    def draft(self, text: IndexedText, limit: int) -> list[int]:
        """Return up to `limit` tokens that followed the longest match, none after an end token."""
        if limit == 0:
            return []
        memory = [] if self.settings.memory is None else self.settings.memory.texts.values()
        found = [(*source.match(text.tokens), source) for source in (text, *reversed(list(memory)))]
        size, end, source = max(found, key=lambda match: match[0])  # among equal matches the first: the row's text
        if size == 0:
            return []
        count = min(limit, self.settings.max_draft, math.ceil(self.settings.factor * size))
        out = source.tokens[end : end + count]
        while source is text and len(out) < count:  # the match overlaps the text's end, so the draft repeats it
            out.append(out[len(out) - (len(text.tokens) - end)])
        return cut_at_end(out, self.eos, self.vocabulary)  # texts in memory may be from another model

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        if self.settings.memory is None:
            return
        self._read(rows)
        for row, finished in zip(rows.row_id_list, rows.finished, strict=True):
            if finished and row not in self.remembered:
                self.remembered.add(row)
                self.settings.memory.add(self.texts[row])

    def fresh(self, rows: int, limit: int, stop: StopRun, processing: Processing, clock: Clock) -> "SuffixRun":
        return SuffixRun(self.settings, self.sampling, self.eos, self.vocabulary)

    def insert(self, places: Sequence[int], numbers: Sequence[int], other: DrafterRun, rows: Sequence[int]) -> None:
        for number in numbers:
            self.texts.pop(number, None)
        self.remembered.difference_update(numbers)


register_drafter(
    "suffix",
    SuffixDrafter,
    paper="2411.04975",
    summary="Drafts what followed the last time that a row's text, or an earlier one, ended like this: no draft model, any batch.",
)
