"""An answer while its tokens arrive: the text that can be shown already, where a stop text ends it, and the shown tokens' log-probabilities."""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..engine.call import TokenLogprobs
from ..text.detokenizer import BYTES, UNFINISHED, Detokenizer, special_in, special_tokens
from .bodies import RequestError


MARKS = 0x10FFFD  # from here downwards: unassigned characters, each standing for a special token; none is shown
LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}  # of byte-level vocabularies
LEAST = -9999.0  # lower bound of log-probabilities, as in OpenAI's API: JSON has no infinity


class TextChanged(RequestError):
    """A text that was partly shown changed afterwards."""


class StopTexts:
    """Texts that end an answer, with the special tokens that occur in them, each of which counts as its text.

    A special token matches as a whole or not at all. `marks`: by token, a character that stands for it in decoded texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = ()):
        special = special_in(tokenizer, texts) if texts else {}
        self.texts, self.reach = list(texts), max(map(len, texts), default=0)
        self.marks = {token: chr(MARKS - index) for index, token in enumerate(special)}
        self._special = {mark: special[token] for token, mark in self.marks.items()}

    def show(self, text: str) -> str:
        """Return `text` without marks."""
        return text.translate(dict.fromkeys(map(ord, self._special)))

    def find(self, text: str, begin: int = 0) -> int:
        """Return where the first stop text begins in `text` from `begin` on; -1 if there is none."""
        spelled, bounds = self._spell(text[begin:])
        positions = {bound: position for position, bound in enumerate(bounds, begin)}
        hits = (
            (hit.start(), len(stop)) for stop in self.texts for hit in re.finditer(f"(?={re.escape(stop)})", spelled)
        )
        return min((positions[at] for at, size in hits if at in positions and at + size in positions), default=-1)

    def count_begun(self, text: str) -> int:
        """Return how many characters at the end of `text` may be the beginning of a stop text."""
        spelled, bounds = self._spell(text[max(len(text) - self.reach, 0) :])
        last = len(bounds) - 1
        starts = (n for n in range(last) if any(stop.startswith(spelled[bounds[n] :]) for stop in self.texts))
        return last - next(starts, last)

    def _spell(self, text: str) -> tuple[str, list[int]]:
        """Return `text` with the texts of special tokens, and where each character of `text` and its end are in that."""
        spellings = [self._special.get(letter, letter) for letter in text]
        return "".join(spellings), [0, *accumulate(map(len, spellings))]


class AnswerText:
    """The text of one answer. `stops`: texts that end it and are not part of it; `prompt`: token ids.

    Stop texts are searched in the decoded text, and special tokens that they contain among its tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: StopTexts, prompt: Sequence[int] = ()):
        self.stops, self.detokenizer = stops, Detokenizer(tokenizer, prompt, stops.marks)
        self._ids: list[int] = []
        self._searched = 0  # characters of the text's final part, in which there is no stop text
        self.shown = 0  # in characters, marks included
        self.stopped = False  # by a stop text

    def more(self, ids: list[int], last: bool = False) -> str:
        """Return what can be shown of the text of `ids`, all its new tokens, beyond what was shown. `last`: no more will come.

        Raises: `TextChanged` if a text that was dropped for lack of memory came out differently when written again.
        """
        before = self._ids[: len(ids)]
        if ids[: len(before)] != before or (last and len(ids) < len(self._ids)):
            raise TextChanged("the text changed while it was written: ask again", 500)
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
        """Return where the text ends."""
        position = self.stops.find(text, max(self._searched - self.stops.reach, 0))
        self.stopped = position >= 0
        if self.stopped:
            return position
        self._searched = max(self._searched, min(len(self.detokenizer.final), len(text)))
        return len(text)


class EndAtStops(StoppingCriteria):
    """Ends a text after the first of `stops`, with any tokenizer; Transformers' criterion supports only some."""

    judges_rows_alone = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: StopTexts, prompt: Sequence[int]):
        """Take the arguments of `AnswerText`."""
        self.text, self.begins = AnswerText(tokenizer, stops, prompt), len(prompt)

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        ended = self.text.stops_at(input_ids[0, self.begins :].tolist())
        return torch.tensor([ended], device=input_ids.device)


class TokenTexts:
    """The text of each token in the middle of a text, and the bytes that it adds."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.special = tokenizer, special_tokens(tokenizer)
        letters = (token for token in range(len(tokenizer)) if tokenizer.decode([token]).isalpha())
        self.before = [next((token for token in letters if token not in self.special), 0)]
        self._texts: dict[int, tuple[str, list[int] | None]] = {
            token: (text, None) for token, text in self.special.items()
        }

    def find(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text and bytes (None for special tokens). Incomplete characters are written as in OpenAI's API: `bytes:\\xe2\\x82`."""
        if token not in self._texts:
            name = self.tokenizer.convert_ids_to_tokens(token)
            text = Detokenizer(self.tokenizer, self.before).decode([token])
            if name in BYTES and text != name:
                data = bytes([int(name[1:-1], 16)])
            else:
                spelled = UNFINISHED in text and name is not None and all(letter in LETTERS for letter in name)
                data = bytes(LETTERS[letter] for letter in name) if spelled else text.encode()
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._texts[token] = text, list(data)
        return self._texts[token]


class AnswerLogprobs:
    """Log-probabilities of one answer as shown: a token is included once its text is shown, or the first part of it if a stop text cuts it.

    Tokens after the last shown character, such as the end token and those of a stop text, are not included.
    """

    def __init__(self, answer: AnswerText, prompt: Sequence[int], texts: TokenTexts, chat: bool):
        """`answer`: its `more` is called before this object's; `prompt`: token ids. `chat`: in the format of /v1/chat/completions."""
        self.answer, self.texts, self.chat = answer, texts, chat
        self._growing, self._text = Detokenizer(texts.tokenizer, prompt, answer.stops.marks), ""
        self._bounds = [0]  # where the text of each token begins, and the end, in characters with marks
        self._shown = self._marks = 0  # tokens, and those of them that are marks

    def more(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], last: bool = False
    ) -> Mapping[str, object] | None:
        """Return the log-probabilities of the tokens shown since the last call; None if there are none. `last`: no more will come."""
        for count in range(len(self._bounds), len(ids) + 1):
            self._grow(self._growing.decode(ids[:count]))
        first, shown, offsets = self._shown, self.answer.shown, list[int]()
        for token, begin, end in zip(ids[first:], self._bounds[first:], self._bounds[first + 1 :], strict=False):
            if begin >= shown or (end > shown and not last):
                break
            offsets.append(begin - self._marks)
            self._marks += token in self.answer.stops.marks
        self._shown += len(offsets)
        new = slice(first, self._shown)
        return self.format(ids[new], logprobs[new], offsets) if offsets else None

    def _grow(self, text: str) -> None:
        """Record the text up to a further token. A character that changes belongs to the last token that spells it."""
        if not text.startswith(self._text):
            same = len(os.path.commonprefix([self._text, text]))
            self._bounds = [min(bound, same) for bound in self._bounds]
        self._text = text
        self._bounds.append(len(text))

    def format(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
    ) -> dict[str, object]:
        """Return log-probabilities of tokens in OpenAI's format. `offsets`: where their texts begin."""
        if self.chat:
            content = [
                self._describe(token, entry.logprob)
                | {"top_logprobs": [self._describe(*other) for other in entry.alternatives]}
                for token, entry in zip(ids, logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        top = []
        for token, entry in zip(ids, logprobs, strict=True):
            likeliest = dict[str, float]()
            for other, logprob in [*entry.alternatives, (token, entry.logprob)]:
                # Of equal texts that of the likeliest.
                likeliest.setdefault(self.texts.find(other)[0], max(logprob, LEAST))
            top.append(likeliest)
        tokens = [self.texts.find(token)[0] for token in ids]
        values = [max(entry.logprob, LEAST) for entry in logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": list(offsets)}

    def _describe(self, token: int, logprob: float) -> dict[str, object]:
        text, data = self.texts.find(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": data}
