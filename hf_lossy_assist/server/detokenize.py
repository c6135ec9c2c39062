"""An answer's text while its tokens arrive: what can be shown already, and where a stop text ends it."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from ..text.detokenizer import Detokenizer, special_in


MARKS = 0x10FFFD  # from here downwards: unassigned characters, each standing for a special token; none is shown


class TextChanged(RuntimeError):
    """A text that was partly shown changed afterwards."""


class StopTexts:
    """Texts that end an answer, with the special tokens that occur in them, each of which counts as its text.

    A special token matches as a whole or not at all. `marks`: by token, a character that stands for it in decoded texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]):
        special = special_in(tokenizer, texts) if texts else {}
        self.texts, self.reach = list(texts), max(map(len, texts), default=0)
        self.marks = {token: chr(MARKS - place) for place, token in enumerate(special)}
        self._special = {mark: special[token] for token, mark in self.marks.items()}

    def show(self, text: str) -> str:
        """Return `text` without marks."""
        return text.translate(dict.fromkeys(map(ord, self._special))) if self.marks else text

    def find(self, text: str, begin: int = 0) -> int:
        """Return where the first stop text begins in `text` from `begin` on; -1 if there is none."""
        if not self.texts:
            return -1
        spelled, bounds = self._spell(text[begin:])
        places = []
        for stop in self.texts:
            at = spelled.find(stop)
            while at >= 0:
                first, last = bisect_left(bounds, at), bisect_left(bounds, at + len(stop))
                if bounds[first] == at and bounds[last] == at + len(stop):
                    places.append(begin + first)
                    break
                at = spelled.find(stop, bounds[first + (bounds[first] == at)])
        return min(places, default=-1)

    def count_begun(self, text: str) -> int:
        """Return how many characters at the end of `text` may be the beginning of a stop text."""
        if not self.texts:
            return 0
        spelled, bounds = self._spell(text[-self.reach :])
        last = len(bounds) - 1
        starts = (
            place for place in range(last) if any(stop.startswith(spelled[bounds[place] :]) for stop in self.texts)
        )
        return last - next(starts, last)

    def _spell(self, text: str) -> tuple[str, Sequence[int]]:
        """Return `text` with the texts of special tokens, and where each character of `text` and its end are in that."""
        if not any(mark in text for mark in self._special):
            return text, range(len(text) + 1)
        parts = [self._special.get(letter, letter) for letter in text]
        return "".join(parts), [0, *accumulate(map(len, parts))]


class AnswerText:
    """The text of one answer. `stops`: texts that end it and are not part of it; `prompt`: token ids.

    Stop texts are searched in the decoded text, and special tokens that they contain among its tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: StopTexts | Sequence[str], prompt: Sequence[int] = ()
    ):
        self.stops = stops if isinstance(stops, StopTexts) else StopTexts(tokenizer, stops)
        self.detokenizer = Detokenizer(tokenizer, prompt, self.stops.marks)
        self._ids: list[int] = []
        self._searched = 0  # characters of the text's final part, in which there is no stop text
        self.shown = 0  # in characters, marks included
        self.stopped = False  # by a stop text

    def more(self, ids: list[int], last: bool = False) -> str:
        """Return what can be shown of the text of `ids`, all its new tokens, beyond what was shown. `last`: no more will come.

        Raises: `TextChanged` if a text that was dropped for lack of memory came out differently when written again.
        """
        known = self._ids[: len(ids)]
        if ids[: len(known)] != known or (last and len(ids) < len(self._ids)):
            raise TextChanged("the text changed while it was written: ask again")
        # A text that is written again, after memory ran out, has nothing new until it reaches its former length.
        if len(ids) < len(self._ids):
            return ""
        self._ids = list(ids)
        text = self.detokenizer.decode(ids) if last else self.detokenizer.stable(ids)
        end = self._find_stop(text)
        if not self.stopped and not last:
            end -= self.stops.count_begun(text)
        out, self.shown = text[self.shown : end], max(end, self.shown)
        return self.stops.show(out)

    def stops_at(self, ids: list[int]) -> bool:
        """Return whether the text of `ids` contains a stop text."""
        self._find_stop(self.detokenizer.decode(ids))
        return self.stopped

    def _find_stop(self, text: str) -> int:
        place = self.stops.find(text, max(self._searched - self.stops.reach, 0))
        self.stopped = place >= 0
        if not self.stopped:
            self._searched = max(self._searched, min(len(self.detokenizer.final), len(text)))
        return place if self.stopped else len(text)


class EndAtStops(StoppingCriteria):
    """Ends a text after the first of `stops`, with any tokenizer; Transformers' criterion supports only some."""

    judges_rows_alone = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: StopTexts | Sequence[str], prompt: Sequence[int]):
        """Take the arguments of `AnswerText`."""
        self.text, self.begins = AnswerText(tokenizer, stops, prompt), len(prompt)

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        ended = self.text.stops_at(input_ids[0, self.begins :].tolist())
        return torch.tensor([ended], device=input_ids.device)


def count_begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
