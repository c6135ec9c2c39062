"""A draft model with another tokenizer: each row's text is retokenized for the draft, and its greedy continuation for
the target.

Universal assisted generation, huggingface.co/blog/universal_assisted_generation.
"""

from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import takewhile

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.introspection import end_tokens
from ..models.row_model import RowModel
from ..round import Draft
from .base import DraftContext, DrafterRun, certain_draft, cut_at_end


ENDLESS = 1 << 40  # no limit is known on the length of a text in the draft's tokens
WHOLE = 256  # tokens of a text up to which it is retokenized as a whole each round
WINDOW = 64  # tokens before the new ones that are retokenized with them in longer texts, and context of a draft


class Retokenizer:
    """Both tokenizers: a text in the target's token ids, in the draft's;
    a long one is retokenized from where it has grown on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase):
        """`tokenizer`: the target's; `draft_tokenizer`: the draft's."""
        self.tokenizer, self.draft_tokenizer = tokenizer, draft_tokenizer
        # By row, the number of tokens of its text that were retokenized, and the result.
        self.known: dict[int, tuple[int, list[int]]] = {}

    def draft_ids(self, row: int, text: list[int]) -> list[int]:
        """Return a row's text in the draft's token ids, at least one."""
        before, ids = self.known.get(row, (0, []))
        grown = None
        if len(text) > WHOLE and before > WINDOW:
            window = self.encoded(self.draft_tokenizer, self.decoded(self.tokenizer, text[before - WINDOW :]))
            tail = ids[-len(window) :]
            same = SequenceMatcher(None, tail, window, autojunk=False).find_longest_match()
            if same.size:
                grown = ids[: len(ids) - len(tail) + same.a + same.size] + window[same.b + same.size :]
        if grown is None:
            grown = self.encoded(self.draft_tokenizer, self.decoded(self.tokenizer, text), special=True)
            if len(grown) > 1 and grown[-1] == self.draft_tokenizer.eos_token_id:  # T5 ends every text with it
                grown = grown[:-1]
        self.known[row] = len(text), grown
        return grown or [self.draft_tokenizer.bos_token_id or 0]

    @staticmethod
    def decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @staticmethod
    def encoded(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])


class RetokenizingRun(DrafterRun):
    """A draft model and both tokenizers during one call.

    The draft decodes greedily, all rows at once. Its tokens have q = 1 in the target's ids, so the output has exactly
    the target's distribution; where the tokenizers split a text differently, drafts are only less often accepted.
    """

    def __init__(self, assistant: PreTrainedModel, words: Retokenizer, context: DraftContext):
        rows = len(context.rows.row_id_list)
        self.words, self.tokenizer, self.draft_tokenizer = words, words.tokenizer, words.draft_tokenizer
        self.assistant = RowModel(assistant, rows, ENDLESS, len(self.draft_tokenizer))
        self.vocabulary, self.sampling, self.clock = context.vocabulary, context.sampling, context.clock
        self.held: list[list[int]] = [[] for _ in range(rows)]  # the draft's tokens in its cache
        self.ends = end_tokens(assistant.generation_config)

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        texts: list[list[int]] = [text.tolist() for text in rows.token_ids()]
        rows_to_draft = zip(rows.row_id_list, texts, limits, strict=True)
        ids_of_rows = [self.words.draft_ids(row, text) if limit else [] for row, text, limit in rows_to_draft]
        rooms = [self._room(ids, limit) for ids, limit in zip(ids_of_rows, limits, strict=True)]
        if not any(rooms):
            return certain_draft([[]] * len(texts), rows, limits, self.sampling)
        # Rows without a draft run along.
        ids_of_rows = [
            ids if room else cached or [0] for ids, room, cached in zip(ids_of_rows, rooms, self.held, strict=True)
        ]
        written = self._write(ids_of_rows, max(rooms))
        drafts = [
            self._in_target_ids(text, ids, new[:room])[:limit] if room else []
            for text, ids, new, room, limit in zip(texts, ids_of_rows, written, rooms, limits, strict=True)
        ]
        drafts = [cut_at_end(draft, rows.eos, self.vocabulary) for draft in drafts]
        return certain_draft(drafts, rows, limits, self.sampling)

    def _room(self, ids: Sequence[int], limit: int) -> int:
        """Return how many of up to `limit` tokens the draft has positions for; the last one is not fed."""
        table = self.assistant.facts.table_end
        return limit if table is None or not limit else max(min(limit, table - len(ids) + 1), 0)

    def _write(self, ids_of_rows: list[list[int]], steps: int) -> list[list[int]]:
        """Return `steps` tokens that the draft writes after each row's ids."""
        valid = [min(_common(had, ids), len(ids) - 1) for had, ids in zip(self.held, ids_of_rows, strict=True)]
        self.assistant.rollback(valid)
        rest = [torch.tensor(ids[n:]) for ids, n in zip(ids_of_rows, valid, strict=True)]
        feed, counts = torch.nn.utils.rnn.pad_sequence(rest, batch_first=True), list(map(len, rest))
        if max(counts) > 1:
            with self.clock.time("draft"):
                self.assistant.feed(feed[:, :-1], [count - 1 for count in counts], keep=0)
        feed = torch.stack([ids[-1:] for ids in rest]).to(self.assistant.device)
        new = []
        for _ in range(steps):
            with self.clock.time("draft"):
                feed = self.assistant.feed(feed, [1] * len(ids_of_rows), keep=1).argmax(dim=-1)  # (B, 1)
            new.append(feed)
        written: list[list[int]] = torch.cat(new, dim=1).tolist()
        self.held = [ids + more[:-1] for ids, more in zip(ids_of_rows, written, strict=True)]
        return written

    def _in_target_ids(self, text: list[int], ids: list[int], new: list[int]) -> list[int]:
        """Return the draft's `new` tokens after `ids`, converted to the target's ids after `text`."""
        new = list(takewhile(lambda token: token not in self.ends, new))
        before = self.words.decoded(self.draft_tokenizer, ids[-WINDOW:])
        whole = self.words.decoded(self.draft_tokenizer, ids[-WINDOW:] + new)
        more = whole[len(before) :] if whole.startswith(before) else self.words.decoded(self.draft_tokenizer, new)
        tail = self.words.decoded(self.tokenizer, text[-WINDOW:])
        cut, longer = self.words.encoded(self.tokenizer, tail), self.words.encoded(self.tokenizer, tail + more)
        # If the new text merges with the last token, the new part is tokenized alone.
        return longer[len(cut) :] if longer[: len(cut)] == cut else self.words.encoded(self.tokenizer, more)

    def select(self, keep: Sequence[int]) -> None:
        self.assistant.select(keep)
        self.held = [self.held[b] for b in keep]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
