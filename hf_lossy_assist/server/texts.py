"""An answer's text as its tokens come: what may be shown already, and where a stop text ends it."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria


UNFINISHED = "�"  # a character of which not all bytes have come


class Changed(RuntimeError):
    """A text that was shown in part is not the one that was written."""


class Text:
    """The text of one answer. `stops`: texts behind which it ends, and which are no part of it."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self.tokenizer, self.stops = tokenizer, list(stops)
        self.text = ""
        self._ids: list[int] = []
        self.shown = 0  # characters
        self._read: tuple[int, int] = (
            0,
            0,
        )  # tokens: those before the second are in `text`; from the first on they are read again

    def more(self, ids: list[int], last: bool = False) -> str:
        """What can be shown of the text of `ids`, all its new tokens, beyond what was shown. `last`: no more will come.

        Raises: `Changed` where a text that memory had no room for came out otherwise when it was written again.
        """
        known = self._ids[: len(ids)]
        if ids[: len(known)] != known or (last and len(ids) < len(self._ids)):
            raise Changed("the text changed while it was written: ask again")
        if len(ids) < len(self._ids):
            return ""
        self._ids = list(ids)
        self._take(ids, last)
        end = len(self.text)
        found = [place for stop in self.stops if (place := self.text.find(stop)) >= 0]
        if found:
            end = min(found)
        elif not last:
            end -= max((_begun(self.text, stop) for stop in self.stops), default=0)
        out, self.shown = self.text[self.shown : end], max(end, self.shown)
        return out

    def _take(self, ids: list[int], last: bool) -> None:
        """Read what is new: a token's characters may depend on the token before it, and a character may need several tokens."""
        begin, end = self._read
        old, new = (self.tokenizer.decode(piece, skip_special_tokens=True) for piece in (ids[begin:end], ids[begin:]))
        if last or not new.endswith(UNFINISHED):
            self.text += new[len(old) :]
            self._read = end, len(ids)


class EndsAt(StoppingCriteria):
    """Ends a text behind the first of `stops`; of any tokenizer, for Transformers' own criterion knows some alone."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], begins: int):
        """`begins`: tokens of the prompt."""
        self.tokenizer, self.stops, self.begins = tokenizer, list(stops), begins
        # A token may be one byte; special ones among them are none.
        self.tail = max(len(stop.encode()) for stop in self.stops) + 8

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ids = input_ids[0, max(self.begins, input_ids.shape[1] - self.tail) :].tolist()
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return torch.tensor([any(stop in text for stop in self.stops)], device=input_ids.device)


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
