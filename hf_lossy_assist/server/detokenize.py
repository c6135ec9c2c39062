"""An answer while its tokens arrive: the text that can be shown already, where a stop text ends it, and the shown tokens' log-probabilities."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from ..engine.call import TokenLogprobs
from ..text.detokenizer import BYTES, UNFINISHED, Detokenizer, special_in, special_tokens


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


def _byte_letters() -> dict[str, int]:
    """Return the byte for each letter of byte-level vocabularies: printable bytes map to themselves, the others in order from 256 on."""
    alphabet = {*ByteLevel.alphabet()}
    moved = (byte for byte in range(256) if chr(byte) not in alphabet)
    return {letter: ord(letter) if ord(letter) < 256 else next(moved) for letter in sorted(alphabet)}


LETTERS = _byte_letters()
LEAST = -9999.0  # lower bound, as in OpenAI's API: JSON has no infinity


class TokenTexts:
    """The text of each token in the middle of a text, and the bytes that it adds."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.special = tokenizer, special_tokens(tokenizer)
        letters = (token for token in range(len(tokenizer)) if tokenizer.decode([token]).isalpha())
        self.before = [next((token for token in letters if token not in self.special), 0)]
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def find(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text and bytes (None for special tokens). Incomplete characters are written as in OpenAI's API: `bytes:\\xe2\\x82`."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> tuple[str, list[int] | None]:
        if token in self.special:
            return self.special[token], None
        name = self.tokenizer.convert_ids_to_tokens(token)
        text = Detokenizer(self.tokenizer, self.before).decode([token])
        if name in BYTES and text != name:
            data = bytes([int(name[1:-1], 16)])
        else:
            spelled = UNFINISHED in text and name is not None and all(letter in LETTERS for letter in name)
            data = bytes(LETTERS[letter] for letter in name) if spelled else text.encode()
        try:
            return data.decode(), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)


class AnswerLogprobs:
    """Log-probabilities of one answer as shown: a token is included once its text is shown, or the first part of it if a stop text cuts it.

    Tokens after the last shown character, such as the end token and those of a stop text, are not included.
    """

    def __init__(self, answer: AnswerText, prompt: Sequence[int], texts: TokenTexts, chat: bool):
        """`answer`: its `more` is called before this object's; `prompt`: token ids. `chat`: in the format of /v1/chat/completions."""
        self.answer, self.texts = answer, texts
        self._form: Callable[..., Mapping[str, object]] = _form_chat if chat else _form_completion
        self._growing = Detokenizer(texts.tokenizer, prompt, answer.stops.marks)
        self._ends: list[int] = []  # end of each token in the answer's text, in characters, marks included
        self._unsettled: list[str] = []  # the texts up to each further token, which may still change
        self._marks = 0  # before the next token
        self._shown = 0  # tokens

    def more(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], last: bool = False
    ) -> Mapping[str, object] | None:
        """Return the log-probabilities of the tokens shown since the last call; None if there are none. `last`: no more will come."""
        for count in range(len(self._ends) + len(self._unsettled) + 1, len(ids) + 1):
            self._unsettled.append(self._growing.decode(ids[:count]))
            self._settle(ids, self._count_settled(ids))
        if last:
            self._settle(ids, len(self._unsettled))
        first, shown, offsets = self._shown, self.answer.shown, list[int]()
        begins = [self._ends[place - 1] if place else 0 for place in range(first, min(len(ids), len(self._ends)))]
        count = sum(1 for begin in begins if begin < shown)
        while not last and count and self._ends[first + count - 1] > shown:
            count -= 1
        for token, begin in zip(ids[first : first + count], begins, strict=False):
            offsets.append(begin - self._marks)
            self._marks += token in self.answer.stops.marks
        self._shown += count
        some = slice(first, first + count)
        return self._form(self.texts, ids[some], logprobs[some], offsets) if count else None

    def _count_settled(self, ids: Sequence[int]) -> int:
        """Return how many of the unsettled tokens end where the text can no longer change."""
        text, first = self._unsettled[-1], len(self._ends)
        end = self._growing.settled(text)
        for count in range(len(self._unsettled), 0, -1):
            known = self._unsettled[count - 1]
            if len(known) <= end and text.startswith(known):
                unfinished = known.endswith(UNFINISHED) or self._growing.joins(ids[first + count - 1])
                return 0 if unfinished else count
        return 0

    def _settle(self, ids: Sequence[int], count: int) -> None:
        """Record the ends of the first `count` unsettled tokens; a character belongs to the last token that spells it."""
        settled, self._unsettled = self._unsettled[:count], self._unsettled[count:]
        before, text = self._ends[-1] if self._ends else 0, (settled or [""])[-1]
        unsettled = ids[len(self._ends) : len(self._ends) + count]
        spelling = [place for place, token in enumerate(unsettled) if not self._is_hidden(token)]
        for place, known in enumerate(settled):
            whole = len(known) < len(text) and text.startswith(known)
            before = max(before, len(known)) if whole or place == max(spelling, default=0) else before
            self._ends.append(before)

    def _is_hidden(self, token: int) -> bool:
        """Return whether a token adds nothing to the text, such as an end token."""
        return token in self.texts.special and token not in self.answer.stops.marks

    def none(self) -> Mapping[str, object]:
        """Return the log-probabilities of an answer without tokens."""
        return self._form(self.texts, [], [], [])


def _form_chat(
    texts: TokenTexts, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> dict[str, object]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, data = texts.find(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": data}

    content = [
        entry(token, found.logprob) | {"top_logprobs": [entry(*other) for other in found.alternatives]}
        for token, found in zip(ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _form_completion(
    texts: TokenTexts, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> dict[str, object]:
    top = []
    for token, found in zip(ids, logprobs, strict=True):
        likeliest = dict[str, float]()
        for other, logprob in [*found.alternatives, (token, found.logprob)]:
            likeliest.setdefault(texts.find(other)[0], max(logprob, LEAST))  # for equal texts that of the likeliest
        top.append(likeliest)
    return {
        "tokens": [texts.find(token)[0] for token in ids],
        "token_logprobs": [max(found.logprob, LEAST) for found in logprobs],
        "top_logprobs": top,
        "text_offset": list(offsets),
    }
