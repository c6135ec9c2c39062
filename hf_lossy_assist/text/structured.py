"""Structured output by grammars and JSON schemas, correct under drafting, in batches and when rows join and leave.

The result is a function of the text: a row's matcher rolls back to the prefix that it shares with the text and reads on. Rejected drafts are
undone, and drafts are masked, too.
"""

import copy
import re
import warnings
import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..artifacts.identity import same_ids, tokenizer_hash
from ..artifacts.loading import find_tokenizer
from ..models.introspection import base_of, vocabulary_of
from ..validation import one_line, require, shown
from .json_schema import check_size, hold_characters, ran_out, read_schema


MOST_BYTES = 1 << 28  # of the cache of compiled grammars
OTHER_WORDS = "the target's token ids are other words: pass the target's own tokenizer"
SOURCES = "a JSON schema (a mapping, its text, or a pydantic model), a grammar in EBNF with a rule root, or one of xgrammar's grammars"
Source: TypeAlias = Any  # see `SOURCES`; the classes of pydantic and xgrammar are not imported here

_compilers: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, Any]]" = weakref.WeakKeyDictionary()


def structured(
    grammar: Source | Sequence[Source], tokenizer: PreTrainedTokenizerBase, *, stop_tokens: Sequence[int] | None = None
) -> "StructuredOutput":
    """Return a logits processor that restricts texts to a grammar or a JSON schema, with an end token where a text is complete.

    For `logits_processor=[…]` of `generate`, with or without `lossy_policy=`, and of `generate_many`. One object may serve several calls in
    turn, but not at the same time.

    Args:
        grammar: a JSON schema as a mapping, string or pydantic model; an EBNF grammar (`root ::= …`); an `xgrammar.Grammar` or
            `CompiledGrammar`; or a list of these, one for each prompt of a batch.
        tokenizer: the target's tokenizer.
        stop_tokens: token ids that may end a text; None: the tokenizer's. They should be those of the generation config.

    Raises: `ValueError` or `TypeError`, one line, for a grammar that cannot be enforced. Source: https://github.com/mlc-ai/xgrammar.
    """
    compiler = _compiler_of(tokenizer, stop_tokens)
    if not isinstance(grammar, list | tuple):
        return StructuredOutput([_compiled(compiler, grammar, "structured")], tokenizer=tokenizer)
    if not grammar:
        raise ValueError(f"structured: expected {SOURCES}, or a list of them, got an empty list")
    grammars = [_compiled(compiler, source, f"structured: number {n}") for n, source in enumerate(grammar)]
    return StructuredOutput(grammars, tokenizer=tokenizer)


class StructuredOutput(LogitsProcessor):
    """The logits processor made by `structured`, a function of the text and the prompt's length.

    Args:
        grammars: compiled xgrammar grammars, one for all rows or one for each prompt.
        begin: length of the prompts; None: inferred from the first call, and from each that does not continue an earlier one.
        ends_stuck: allow an end token where the tokenizer has no token that can follow; else none is allowed, which `generate` refuses.
        tokenizer: that of the grammars, to be compared with the target's; None: it is the target's.
    """

    def __init__(
        self,
        grammars: Sequence[Any],
        begin: int | None = None,
        ends_stuck: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.grammars, self.begin, self._finds_begin = tuple(grammars), begin, begin is None
        self.ends_stuck, self.tokenizer = ends_stuck, tokenizer
        self._rows: dict[int, MatchedRow] = {}
        self._only: Sequence[int] | None = None  # the rows of a processor for some rows of the call
        self._prompts = torch.empty(0)
        self._longest = 0  # longest text of the call so far

    def at(self, begin: int) -> "StructuredOutput":
        """Return a copy for prompts of `begin` tokens."""
        return StructuredOutput(self.grammars, begin, self.ends_stuck, self.tokenizer)

    def check(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Refuse a target whose token ids are other words: by the call's `tokenizer`, or else by the one in the target's folder.

        Raises: `ValueError`, one line. Warns if there is none, and the target's vocabulary is much larger than the grammar's.
        """
        base, ours = base_of(target), self.tokenizer
        if ours is None or tokenizer is ours or ours.name_or_path == base.config.name_or_path != "":
            return
        if tokenizer is None and not base.config.is_encoder_decoder:  # whose encoder may have another
            tokenizer = find_tokenizer(target)
        if tokenizer is not None:
            if tokenizer_hash(tokenizer) != tokenizer_hash(ours) and not same_ids(tokenizer, ours):
                raise ValueError(f"structured: tokenizer: {OTHER_WORDS}")
        elif vocabulary_of(base) > 1.02 * len(ours) + 1024:  # more than padding
            sizes = f"it has {len(ours)} tokens, the target {vocabulary_of(base)}"
            warnings.warn(f"structured: tokenizer: {sizes}: if it is another model's, {OTHER_WORDS}", stacklevel=2)

    def of_rows(self, rows: Sequence[int], batch: int) -> "StructuredOutput":
        """Return a processor for some rows of `batch`, which shares their matchers."""
        for row in rows:
            self._matched(row, batch)
        out = copy.copy(self)
        out._only = rows
        return out

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores` (B, V) with −∞ for each token that cannot follow `input_ids` (B, n). After a text outside the grammar, any can."""
        batch = len(input_ids)
        if self.tokenizer is not None and self.tokenizer.vocab_size > scores.shape[1]:
            sizes = f"it has {self.tokenizer.vocab_size} tokens, the model {scores.shape[1]}"
            raise ValueError(f"structured: tokenizer: {OTHER_WORDS} ({sizes})")
        if self._finds_begin:
            self._find_begin(input_ids)
        rows = range(batch) if self._only is None else self._only
        words = [
            self._matched(row, batch).following(text)
            for row, text in zip(rows, input_ids[:, self.begin :].tolist(), strict=True)
        ]
        bits = torch.stack(words).to(scores.device)[:, :, None] >> torch.arange(32, device=scores.device)
        size = min(scores.shape[1], self.grammars[0].tokenizer_info.vocab_size)  # the last word has unused bits
        allowed = (bits & 1).bool().flatten(1)[:, :size]
        forbidden = torch.nn.functional.pad(~allowed, (0, scores.shape[1] - allowed.shape[1]), value=True)
        return scores.masked_fill(forbidden, float("-inf"))

    def _matched(self, row: int, batch: int) -> "MatchedRow":
        if row not in self._rows:
            count = len(self.grammars)
            if batch % count:
                raise ValueError(
                    f"structured: {count} grammars for a call of {batch} texts: pass one for all, or one for each prompt; for generate_many a "
                    'function of a prompt\'s token ids, or a key "logits_processor" of a prompt'
                )
            self._rows[row] = MatchedRow(self.grammars[row * count // batch], self.ends_stuck)
        return self._rows[row]

    def _find_begin(self, ids: torch.Tensor) -> None:
        length, begin = ids.shape[1], self._prompts.shape[-1]
        goes_on = begin <= length <= self._longest + 1 and (len(ids), ids.device) == (
            len(self._prompts),
            self._prompts.device,
        )
        if not (self._rows and goes_on and torch.equal(ids[:, :begin], self._prompts)):
            self.begin, self._prompts, self._longest = length, ids.clone(), length
            self._rows.clear()
        self._longest = max(self._longest, length)


class MatchedRow:
    """The matcher of a row, the tokens after the prompt that it has read, and the bitmask after each number of them."""

    def __init__(self, grammar: Any, ends_stuck: bool = False):
        xgrammar, self.ends_stuck = import_xgrammar(), ends_stuck
        self.matcher, self.tokens = xgrammar.GrammarMatcher(grammar), list[int]()
        self.words = xgrammar.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)
        self.masks: dict[int, torch.Tensor] = {}  # the draft's are reused for the target

    def following(self, text: list[int]) -> torch.Tensor:
        """Return a bitmask of the tokens that may follow `text`, (⌈V / 32⌉,) int32; all, if `text` is outside the grammar."""
        if len(text) in self.masks and text == self.tokens[: len(text)]:
            return self.masks[len(text)]
        if not self._read(text):
            return torch.full_like(self.words[0], -1)
        return self.masks.setdefault(len(self.tokens), self._mask())

    def _read(self, text: list[int]) -> bool:
        """Move the matcher to the end of `text`, or until it terminates; return False if the text is outside the grammar."""
        same = len(self.tokens)
        if text[:same] != self.tokens:
            pairs = zip(self.tokens, text, strict=False)
            same = next((n for n, (read, token) in enumerate(pairs) if read != token), min(same, len(text)))
            self.matcher.rollback(len(self.tokens) - same)
            del self.tokens[same:]
            self.masks = {count: mask for count, mask in self.masks.items() if count <= same}
        for token in text[same:]:
            if self.matcher.is_terminated():
                break
            if not self.matcher.accept_token(token):  # from a drafter without scores
                return False
            self.tokens.append(token)
        return True

    def _mask(self) -> torch.Tensor:
        if not self.matcher.is_terminated():
            self.matcher.fill_next_token_bitmask(self.words)
            if not self.ends_stuck or bool(self.words.any()):
                return self.words[0].clone()
        ends = torch.zeros_like(self.words[0])
        for token in self.matcher.stop_token_ids:
            ends[token // 32] |= 1 << token % 32 if token % 32 < 31 else -(1 << 31)  # sign bit
        return ends

    def is_whole(self, text: list[int]) -> bool:
        """Return whether `text`, which ends with an end token, matches the grammar."""
        return self._read(text) and self.matcher.is_terminated()


def import_xgrammar() -> Any:
    """Import xgrammar."""
    require("hla.structured", "xgrammar")
    return import_module("xgrammar")


def make_tokenizer_info(tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[int] | None) -> Any:
    """Make xgrammar's `TokenizerInfo`. Raises: `ValueError`, one line, for an unsupported tokenizer."""
    xgrammar = import_xgrammar()
    try:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=stop_tokens and list(stop_tokens))
    except Exception as error:
        raise ValueError(f"structured: xgrammar cannot read the tokenizer: {one_line(error)}") from None
    if not info.stop_token_ids:
        raise ValueError("structured: the tokenizer has no end token, so no text would end: pass stop_tokens=[…]")
    return info


def _compiler_of(tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[int] | None) -> Any:
    xgrammar = import_xgrammar()
    key = len(tokenizer), tokenizer.eos_token_id, stop_tokens and tuple(stop_tokens)
    last_key, compiler = _compilers.get(tokenizer, (None, None))
    if last_key != key:
        compiler = xgrammar.GrammarCompiler(make_tokenizer_info(tokenizer, stop_tokens), cache_limit_bytes=MOST_BYTES)
        _compilers[tokenizer] = key, compiler
    return compiler


def _compiled(compiler: Any, source: Source, name: str) -> Any:
    """Compile the grammar of `source`, called `name` in errors."""
    xgrammar = import_xgrammar()
    if isinstance(source, xgrammar.CompiledGrammar):
        return source
    schema = getattr(source, "model_json_schema", None)
    if not callable(schema) and not isinstance(source, Mapping | str | xgrammar.Grammar):
        raise TypeError(f"{name}: expected {SOURCES}, got {shown(source)}")
    try:
        if callable(schema):
            source = schema()
        if isinstance(source, Mapping) or (isinstance(source, str) and source.lstrip().startswith("{")):
            source = hold_characters(xgrammar.Grammar.from_json_schema(read_schema(source)))
        elif isinstance(source, str):
            check_size(source)
        return find_begin(compiler.compile_grammar(source))
    except (ValueError, TypeError, RuntimeError, RecursionError, MemoryError) as error:
        if ran_out(error):
            raise MemoryError(
                f"{name}: {shown(source)} takes more memory to compile than there is: pass less"
            ) from None
        raise ValueError(
            f"{name}: {shown(source)} is no schema or grammar that can be held to: {name_reason(error)}"
        ) from None


def name_reason(error: BaseException) -> str:
    """Return an error's message without xgrammar's prefix of time and source location."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", one_line(error))


def find_begin(grammar: Any) -> Any:
    """Return `grammar`. Raises: `ValueError` if no token can begin a text, as for a rule that consists of itself."""
    if not bool(MatchedRow(grammar).following([]).any()):
        raise ValueError("no text of it begins with a token of the tokenizer")
    return grammar
