"""Small tokenizers of each kind: byte-level, SentencePiece-like with and without a first space, byte fallback, WordPiece-like; and texts as token ids."""

import random
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


SPACE = "\u2581"
WORDS = (
    "The", "capital", "of", "France", "is", "Paris", "and", "big", "ab", "do", "n't", "'s", "'", "n", "t", ",", ".",
    "?", "naïve", "東京", "é",
)  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
STOP = "<|im_end|>"  # special, and no end token


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"{space}{word}" for word in WORDS if word.isascii() for space in ("", "Ġ")]
    vocab = {piece: place for place, piece in enumerate(dict.fromkeys([*alphabet, *words, "Ċ", "ĠĠ"]))}
    tokenizer = Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def _pieces() -> dict[str, int]:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [f"{space}{word}" for word in WORDS for space in ("", SPACE)] + [SPACE, SPACE * 2, SPACE * 3, "ly"]
    return {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}


def _sentencepiece(decoder: Any, scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(_pieces(), [], byte_fallback=True, ignore_merges=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE) if scheme == "never" else None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=True)
    tokenizer.decoder = decoder
    return tokenizer


def llama2() -> Tokenizer:
    """Byte fallback, and the first space stripped."""
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(decoders.Sequence(parts), "first")


def gemma() -> Tokenizer:
    """Byte fallback, and no space is stripped."""
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return _sentencepiece(decoders.Sequence(parts), "never")


def metaspace(scheme: str) -> Callable[[], Tokenizer]:
    return lambda: _sentencepiece(decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=True), scheme)


def wordpiece() -> Tokenizer:
    words = ["<unk>", *WORDS, *(f"##{word}" for word in WORDS)]
    tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(cleanup=False)
    return tokenizer


KINDS: dict[str, tuple[Callable[[], Tokenizer], bool]] = {  # and whether Transformers cleans spaces up
    "byte_level": (byte_level, False),
    "llama2": (llama2, False),
    "gemma": (gemma, False),
    "metaspace_first": (metaspace("first"), False),
    "metaspace_always": (metaspace("always"), False),
    "metaspace_never": (metaspace("never"), False),
    "wordpiece": (wordpiece, False),
    "wordpiece_cleaned": (wordpiece, True),
}


def build_tokenizer(kind: str) -> Any:
    """A tokenizer of that kind, with `SPECIAL` tokens and `STOP`."""
    build, cleans = KINDS[kind]
    extra = [AddedToken(STOP, special=True, normalized=False)]
    return PreTrainedTokenizerFast(
        tokenizer_object=build(), clean_up_tokenization_spaces=cleans, padding_side="left", extra_special_tokens=extra, **SPECIAL
    )  # fmt: skip


def spelled(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`, a character each, or a byte each where there is no token for it."""
    ids, vocab = [], tokenizer.get_vocab()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    if "Ġ" in vocab:
        return [vocab[letter] for letter in letters]
    for letter in text.replace(" ", SPACE):
        ids += [vocab[letter]] if letter in vocab else [vocab[f"<0x{byte:02X}>"] for byte in letter.encode()]
    return ids


LETTERS = ["€", "🧙", "é", "\n", " ", "    ", "\t", "ሰላም", " a"]


def drawn(tokenizer: Any, rng: random.Random, most: int = 60) -> list[int]:
    """Up to `most` token ids: of any kind, whole characters, and parts of some; some of them special."""
    size, ids, bytes_too = len(tokenizer), [], "##ab" not in tokenizer.get_vocab()
    for _ in range(rng.randint(0, most // 4)):
        if bytes_too and rng.random() < 0.5:
            letters = spelled(tokenizer, rng.choice(LETTERS))
            ids += letters if rng.random() < 0.9 else letters[: rng.randint(0, len(letters))]
        elif rng.random() < 0.1:
            ids.append(rng.choice(sorted(tokenizer.added_tokens_decoder)))
        else:
            least = 256 if bytes_too and rng.random() < 0.3 else 0
            ids += [rng.randrange(least, size) for _ in range(rng.randint(1, 4))]
    return ids[:most]
