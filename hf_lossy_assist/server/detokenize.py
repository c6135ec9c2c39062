"""An answer's text while its tokens arrive: what can be shown already, and where a stop text ends it."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from ..models.texts import Detokenizer, special_in


MARKS = 0x10FFFD  # from here downwards: unassigned characters, each standing for a special token; none is shown


class TextChanged(RuntimeError):
    """A text that was partly shown changed afterwards."""


class AnswerText:
    """The text of one answer. `stops`: texts that end it and are not part of it; `prompt`: token ids.

    Stop texts are searched in the decoded text, and special tokens that they contain among its tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], prompt: Sequence[int] = ()):
        special = special_in(tokenizer, stops) if stops else {}
        marks = self.marks = {token: chr(MARKS - place) for place, token in enumerate(special)}
        self.stops = list(stops)
        for token in sorted(special, key=lambda token: -len(special[token])):
            self.stops += [stop.replace(special[token], marks[token]) for stop in self.stops if special[token] in stop]
        self.unseen = str.maketrans(dict.fromkeys(marks.values()))
        self.detokenizer = Detokenizer(tokenizer, prompt, marks)
        self._ids: list[int] = []
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
            end -= max((count_begun(text, stop) for stop in self.stops), default=0)
        out, self.shown = text[self.shown : end], max(end, self.shown)
        return out.translate(self.unseen)

    def stops_at(self, ids: list[int]) -> bool:
        """Return whether the text of `ids` contains a stop text."""
        self._find_stop(self.detokenizer.decode(ids))
        return self.stopped

    def _find_stop(self, text: str) -> int:
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        self.stopped = bool(found)
        return min(found, default=len(text))


class EndAtStops(StoppingCriteria):
    """Ends a text after the first of `stops`, with any tokenizer; Transformers' criterion supports only some."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], prompt: Sequence[int]):
        """Take the arguments of `AnswerText`."""
        self.text, self.begins = AnswerText(tokenizer, stops, prompt), len(prompt)

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        ended = self.text.stops_at(input_ids[0, self.begins :].tolist())
        return torch.tensor([ended], device=input_ids.device)


def count_begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
