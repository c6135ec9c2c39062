"""Drafts without a model: what followed earlier occurrences of the text's last tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..batch.logits_processing import Processing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..batch.suffix_memory import MAX_MATCH, MIN_MATCH, IndexedText, SuffixMemory
from ..registry import register_drafter
from ..round import Draft, Verified
from ..stats.clock import Clock
from ..stops import StopRun
from ..validation import LONGEST_DRAFT, check_int, check_positive, shown
from .base import DraftContext, Drafter, DrafterRun, certain_draft, cut_at_end


LONGEST_MATCH = 64


@dataclass(frozen=True)
class SuffixDrafter(Drafter):
    """Continue a row as its text, or an earlier one, continued at the last occurrence of the row's latest tokens. No
    draft model; any batch.

    The longest match wins, among equal ones the latest; the draft has at most `factor` times as many tokens as match
    (Oliaro et al., SuffixDecoding, huggingface.co/papers/2411.04975, with an index of n-grams in place of a suffix
    tree). Tokens have q = 1, so the output has exactly the target's distribution. The call's stop still limits each
    draft.

    Args:
        min_match: tokens that must match.
        max_match: the most tokens that are compared.
        factor: drafted tokens for each matching one.
        max_draft: the most tokens of one round.
        memory (`SuffixMemory`, *optional*): texts of earlier calls, to which this call's are added.
    """

    min_match: int = MIN_MATCH
    max_match: int = MAX_MATCH
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


class SuffixRun(DrafterRun):
    """The texts of one call, indexed as they grow."""

    skip_validation = True

    def __init__(self, settings: SuffixDrafter, sampling: bool, eos: set[int], vocabulary: int):
        self.settings, self.sampling, self.eos, self.vocabulary = settings, sampling, eos, vocabulary
        self.texts: dict[int, IndexedText] = {}  # by row number in the call
        self.remembered: set[int] = set()

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        drafts = [tokens for _, tokens in self.find(rows, limits)]
        return certain_draft(drafts, rows, limits, self.sampling)

    def find(self, rows: Rows, limits: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return, for each row, how many tokens match, and up to `limits[b]` tokens that followed them."""
        self._read(rows)
        matches = []
        for b, (row, limit) in enumerate(zip(rows.row_id_list, limits, strict=True)):
            text, memories = self.texts[row], rows.memories.get(row, ())
            start = len(text.tokens) - (rows.lengths[b] - rows.prompt_lengths[b])
            matches.append(self._look_up(text, limit, memories, start))
        return matches

    def _read(self, rows: Rows) -> None:
        """Index the tokens committed since the last round."""
        for b, row in enumerate(rows.row_id_list):
            if row not in self.texts:
                self.texts[row] = IndexedText(self.settings.min_match, self.settings.max_match)
            indexed = self.texts[row]
            indexed.extend(rows.text_on_host(b)[len(indexed.tokens) :])

    def draft(self, text: IndexedText, limit: int) -> list[int]:
        """Return up to `limit` tokens that followed the longest match, none after an end token."""
        return self._look_up(text, limit, (), len(text.tokens))[1]

    def _look_up(
        self, text: IndexedText, limit: int, memories: Sequence[SuffixMemory], start: int
    ) -> tuple[int, list[int]]:
        """Return the length of the longest match, and what followed it; the new tokens of `text` begin at `start`."""
        if limit == 0:
            return 0, []
        shared = self.settings.memory
        searched = memories if shared is None else (*memories, shared)
        matches = [(*text.match(text.tokens), text.tokens)]
        matches += [memory.match_start(text.tokens[start:]) for memory in memories]
        matches += [memory.match(text.tokens, text.sizes) for memory in searched]
        size, end, source = max(matches, key=lambda match: match[0])  # among equal matches the first: the row's text
        if size == 0:
            return 0, []
        count = min(limit, self.settings.max_draft, math.ceil(self.settings.factor * size))
        out = source[end : end + count]
        while source is text.tokens and len(out) < count:  # the match overlaps the text's end, so the draft repeats it
            out.append(out[len(out) - (len(source) - end)])
        return size, cut_at_end(out, self.eos, self.vocabulary)  # texts in memory may be from another model

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        shared = () if self.settings.memory is None else (self.settings.memory,)
        for b, (row, finished) in enumerate(zip(rows.row_id_list, rows.finished, strict=True)):
            growing = [memory for memory in (*shared, *rows.memories.get(row, ())) if memory.grows]
            if finished and growing and row in self.texts and row not in self.remembered:
                self.remembered.add(row)
                text = self.texts[row]
                text.extend(rows.text_on_host(b)[len(text.tokens) :])
                for memory in growing:
                    memory.add(text)

    def fresh(self, rows: int, limit: int, stop: StopRun, processing: Processing, clock: Clock) -> "SuffixRun":
        return SuffixRun(self.settings, self.sampling, self.eos, self.vocabulary)

    def insert(self, slots: Sequence[int], row_ids: Sequence[int], other: DrafterRun, rows: Sequence[int]) -> None:
        for row_id in row_ids:
            self.texts.pop(row_id, None)
        self.remembered.difference_update(row_ids)


register_drafter(
    "suffix",
    SuffixDrafter,
    paper="2411.04975",
    summary="Drafts what followed the last time that a row's text, or an earlier one, ended like this: no draft model, "
    "any batch.",
)
