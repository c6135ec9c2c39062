"""Texts indexed by their n-grams: the text of a row as it grows, finished texts, and documents that will be copied."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ..validation import check_int


MIN_MATCH, MAX_MATCH = 2, 8  # tokens that must match, and the most that are compared
POOL_TOKENS = 1 << 15  # of finished texts that continuous batching searches
PLACES = 1 << 32  # more than a text has tokens


class IndexedText:
    """A text with the last end position of each n-gram of `min_match` to `max_match` tokens."""

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH):
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
        """Return the length of the longest indexed n-gram that `text` ends with (0: none), and its end position in this
        text."""
        for size in reversed(self.sizes):
            if size <= len(text):
                end = self.ends.get(tuple(text[len(text) - size :]))
                if end is not None:
                    return size, end
        return 0, 0


class SuffixMemory:
    """Texts of earlier calls that a `SuffixDrafter` also searches, in one index: pass the same object to each call.

    Args:
        max_tokens: total over all texts; the oldest ones are dropped first. Each takes about 1 KB with its n-grams.
    """

    grows = True  # finished texts are added

    def __init__(self, max_tokens: int = 1_000_000):
        check_int("SuffixMemory.max_tokens", max_tokens, 1)
        self.max_tokens, self.tokens = max_tokens, 0
        self.texts: OrderedDict[int, tuple[list[int], range]] = OrderedDict()  # and the sizes of the n-grams
        # By the hash of an n-gram: the number of the latest text with it, and its end. Hashes that collide cost a bad
        # draft.
        self._found: dict[int, int] = {}
        self._next = 0
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Remove all texts."""
        with self._lock:
            self.texts.clear()
            self._found.clear()
            self.tokens = 0

    def add(self, text: IndexedText) -> None:
        """Add a finished text, which must not grow any more."""
        with self._lock:
            text_id, self._next = self._next, self._next + 1
            self.texts[text_id] = text.tokens, text.sizes
            self.tokens += len(text.tokens)
            self._found.update({hash(gram): text_id * PLACES + end for gram, end in text.ends.items()})
            while self.tokens > self.max_tokens and self.texts:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        text_id, (tokens, sizes) = self.texts.popitem(last=False)
        self.tokens -= len(tokens)
        for size in sizes:
            for end in range(size, len(tokens)):
                key = hash(tuple(tokens[end - size : end]))
                if self._found.get(key, -1) // PLACES == text_id:
                    del self._found[key]

    def match(self, text: Sequence[int], sizes: range) -> tuple[int, int, list[int]]:
        """Return the length of the longest n-gram that `text` ends with, of `sizes`, its end, and the latest text with
        it; length 0: none."""
        for size in reversed(sizes):
            start = self._found.get(hash(tuple(text[len(text) - size :]))) if size <= len(text) else None
            if start is not None and start // PLACES in self.texts:
                return size, start % PLACES, self.texts[start // PLACES][0]
        return 0, 0, []

    def match_start(self, new: Sequence[int]) -> tuple[int, int, list[int]]:
        """Return a match as `match` does if a document that will be copied begins with `new`, the first new tokens of a
        row."""
        return 0, 0, []


class Hints(SuffixMemory):
    """Documents that will be copied, as token ids: a draft begins with the first one's beginning."""

    grows = False

    def __init__(self, documents: Iterable[Sequence[int]]):
        documents = [list(document) for document in documents]
        super().__init__(max(sum(map(len, documents)), 1))
        for document in reversed(documents):  # of equal matches the latest added wins
            text = IndexedText()
            text.extend(document)
            self.add(text)

    def match_start(self, new: Sequence[int]) -> tuple[int, int, list[int]]:
        if len(new) < MIN_MATCH:
            for tokens, _ in reversed(self.texts.values()):
                if len(tokens) > len(new) and tokens[: len(new)] == list(new):
                    return MIN_MATCH, len(new), tokens
        return 0, 0, []
