"""Text that tokens add after a prompt: decode(prompt + new) minus decode(prompt), whole or incrementally.

Decoding the new tokens alone gives another text: SentencePiece-style decoders strip the first space of their input.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING


if TYPE_CHECKING:  # commands import this file, and answer without a model library
    from transformers import PreTrainedTokenizerBase


UNFINISHED = "\ufffd"  # a character whose bytes are incomplete
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))  # tokens of byte fallback, whose runs decode together
CONTEXT = 16  # characters before new tokens that affect how these decode, and tokens that are tried first
REWRITTEN = 32  # characters at the end that may be rewritten by decoders that clean spaces up: "n ' t" becomes "n't"
PROBE = "a . a ? a ! a , a ' a n't a 'm a 's a 've a 're a"  # all that these rewrite
LAG = 16  # tokens at the end that are always decoded again
NONE: Mapping[int, str] = MappingProxyType({})


def continuation(
    tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], new: Sequence[int], visible: Mapping[int, str] = NONE
) -> str:
    """Return the text that the token ids `new` add after those of `prompt`, without special tokens except `visible`
    ones.

    visible: special tokens to keep, with the text of each.
    """
    return Detokenizer(tokenizer, prompt, visible).added(list(new))


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """Return the tokens that decoding skips, with their texts, by id."""
    try:
        added = tokenizer.added_tokens_decoder
    except NotImplementedError:  # Transformers' MistralCommonBackend, all of whose special tokens are named
        added = {}
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {token: entry.content for token, entry in added.items() if entry.special}


def special_in(tokenizer: "PreTrainedTokenizerBase", texts: Iterable[str]) -> dict[int, str]:
    """Return the special tokens that occur in any of `texts`, by id."""
    texts = list(texts)
    return {
        token: content
        for token, content in special_tokens(tokenizer).items()
        if any(content in text for text in texts)
    }


class Detokenizer:
    """Incremental decoder of new tokens after a prompt, in time that depends on the length of neither.

    Only the latest tokens are decoded again, with as much context in front as affects them.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], visible: Mapping[int, str] = NONE):
        """Take the arguments of `continuation`."""
        self.tokenizer, self.visible, self.prompt = tokenizer, visible, prompt
        self._begin()

    def decode(self, new: Sequence[int]) -> str:
        """Return the text of all token ids so far, `new`. They usually extend those of the last call, but need not."""
        new = list(new)
        done = len(self._done)
        if new[:done] != self._done:
            self._begin()
            done = 0
        text = self.final + self.added(new[done:])
        self._advance(new, text)
        return text

    def stable(self, new: Sequence[int]) -> str:
        """Return the beginning of `decode(new)` that further tokens cannot change;
        nothing while the last character is incomplete."""
        end = len(new)
        while end and self.joins(new[end - 1]):
            end -= 1
        text = self.decode(new[:end])
        if text.endswith(UNFINISHED):
            return ""
        return text[: max(len(text) - REWRITTEN, 0)] if self.cleans else text

    @cached_property
    def cleans(self) -> bool:
        """Whether decoding removes spaces. The setting alone does not tell: Transformers ignores it for BPE."""
        if not getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return False
        ids = self.tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        return bool(self.tokenizer.decode(ids) != self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _begin(self) -> None:
        self._done: list[int] = []  # tokens whose text is final
        self.final = ""  # that text
        self._context = self._deciding(self.prompt)

    def _advance(self, new: list[int], text: str) -> None:
        """Mark tokens up to `LAG` before the last as final, if the text shows that later tokens do not change them."""
        done, end = len(self._done), len(new) - LAG
        if end - done < LAG:
            return
        while end > done and self.joins(new[end - 1]):
            end -= 1
        settled = self.final + self.added(new[done:end])
        if end > done and text.startswith(settled):
            self._context = self._deciding(self._context + new[done:end])
            self._done, self.final = new[:end], settled

    def added(self, new: list[int]) -> str:
        """Return the text of `new` after the tokens whose text is final, with visible tokens in place."""
        out, begin = "", 0
        for index, token in enumerate(new):
            if token in self.visible:
                out += self._difference(self._context + new[:begin], new[begin:index]) + self.visible[token]
                begin = index + 1
        return out + self._difference(self._context + new[:begin], new[begin:])

    def _difference(self, before: list[int], new: list[int]) -> str:
        if not new:
            return ""
        old, whole = self._read(before), self._read(before + new)
        return whole[len(os.path.commonprefix([old, whole])) :]  # shorter than `old` where `new` completes a character

    def _deciding(self, ids: Sequence[int]) -> list[int]:
        """Return the last of `ids`, as many as affect how following tokens decode."""
        count = CONTEXT
        while count < len(ids):
            last = list(ids[-count:])
            if len(self._read(last)) >= CONTEXT and not self.joins(last[0]):
                return last
            count *= 2
        return list(ids)

    def _read(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

    def joins(self, token: int) -> bool:
        """Return whether bytes on both sides of `token` belong to one run: it is a byte, or decodes to nothing, as
        special tokens do."""
        return self.tokenizer.convert_ids_to_tokens(token) in BYTES or not self._read([token])
