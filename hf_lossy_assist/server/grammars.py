"""Grammars that requests ask for: compiled once in another process, and passed to the texts that must match them."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..text.structured import find_begin, import_xgrammar, make_tokenizer_info, name_reason
from ..validation import format_missing
from .bodies import RequestError
from .grammar_process import GrammarProcess, TooMuch, give_back_memory


WAITING_SECONDS = 60  # for a grammar, since the request
MOST_WAITING = 8  # grammars not compiled yet
MOST_GRAMMARS, MOST_BYTES = 64, 2**28  # number of cached grammars, and bytes of their JSON; they take as much memory


@dataclass(frozen=True)
class GrammarSource:
    """A grammar that a request asks for. field: of the request, for errors; kind, text: see `GrammarProcess.compile`."""

    field: str
    kind: str
    text: str


class Grammars:
    """Compiled grammars of one tokenizer. A grammar that several requests ask for is compiled once, and grammars one after the other.

    Args:
        ends: the target's end tokens; empty: the tokenizer's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]):
        self.tokenizer, self.ends = tokenizer, sorted(ends) or None
        # Each with its bytes; a string is the reason why there is none.
        self.compiled: OrderedDict[tuple[str, str], asyncio.Future[tuple[Any, int]]] = OrderedDict()
        self.process: GrammarProcess | None = None
        self._thread = ThreadPoolExecutor(1, "hf-lossy-grammars")
        self._info: Any = None

    async def get(self, source: GrammarSource) -> Any:
        """Return a compiled grammar. Raises: `RequestError`, one line."""
        key = source.kind, source.text
        if key not in self.compiled:
            if sum(not future.done() for future in self.compiled.values()) >= MOST_WAITING:
                raise RequestError(f"{source.field}: too many schemas are being compiled: try again later", 503)
            self.compiled[key] = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, *key)
            self.compiled[key].add_done_callback(lambda future: self._forget(key, future))
        self.compiled.move_to_end(key)
        try:
            grammar, _ = await asyncio.wait_for(asyncio.shield(self.compiled[key]), WAITING_SECONDS)
        except TooMuch as error:
            raise RequestError(f"{source.field}: {error}", error.status) from None
        except asyncio.TimeoutError:
            raise RequestError(f"{source.field}: other schemas are being compiled: try again later", 503) from None
        if isinstance(grammar, str):
            raise RequestError(f"{source.field}: {grammar}")
        return grammar

    def close(self) -> None:
        """Stop compiling, now and in future."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.process is not None:
            self.process.close()

    def _forget(self, key: tuple[str, str], future: "asyncio.Future[tuple[Any, int]]") -> None:
        """Forget a grammar that took too much, and the oldest ones if there are too many."""
        if future.cancelled() or future.exception() is not None:
            del self.compiled[key]
        sizes = {
            key: future.result()[1]
            for key, future in self.compiled.items()
            if future.done() and not future.cancelled() and future.exception() is None
        }
        while len(sizes) > MOST_GRAMMARS or sum(sizes.values()) > MOST_BYTES:
            oldest = next(iter(sizes))
            del sizes[oldest], self.compiled[oldest]

    def _compile(self, kind: str, text: str) -> tuple[Any, int]:
        """Return a compiled grammar, or one line on why there is none, and its bytes. Runs in the thread."""
        try:
            if self.process is None:
                self._info = make_tokenizer_info(self.tokenizer, self.ends)
                self.process = GrammarProcess(self._info.serialize_json())
            compiled = self.process.compile(kind, text)
            grammar = import_xgrammar().CompiledGrammar.deserialize_json(compiled, self._info)
            return find_begin(grammar), len(compiled)  # its `memory_size_bytes` is a fortieth of what it takes
        except ImportError:
            return format_missing("this server", ["xgrammar"]), 0
        except ValueError as error:
            return f"it is no schema that can be held to: {name_reason(error)}", 0
        finally:
            compiled = ""
            give_back_memory()
