"""Grammars that requests ask for: compiled once in another process, and passed to the texts that must match them."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..text.structured import find_begin, import_xgrammar, make_tokenizer_info, name_reason
from ..validation import one_line
from .bodies import RequestError
from .grammar_process import COMPILE_SECONDS, GrammarProcess, NotCompiled, TooMuch, give_back_memory


WAITING_SECONDS = 60  # for a grammar, since the request
MOST_WAITING = 8  # grammars not compiled yet
MOST_GRAMMARS, MOST_BYTES = 64, 2**28  # number of cached grammars, and bytes of their JSON; they take as much memory
NOT_INSTALLED = "this server needs xgrammar for it, which is not installed: its operator can pip install 'hf_lossy_assist[structured]'"


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
        seconds: limit for compiling one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int], seconds: float = COMPILE_SECONDS):
        self.tokenizer, self.ends, self.seconds = tokenizer, sorted(ends) or None, seconds
        # With their bytes; a string is the reason why there is none.
        self._known: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()
        self._waiting: dict[tuple[str, str], asyncio.Future[Any]] = {}
        self._thread = ThreadPoolExecutor(1, "hf-lossy-grammars")
        self._process: GrammarProcess | None = None
        self._info: Any = None

    async def get(self, source: GrammarSource) -> Any:
        """Return a compiled grammar. Raises: `RequestError`, one line."""
        key = source.kind, source.text
        if key not in self._known:
            if key not in self._waiting:
                if len(self._waiting) >= MOST_WAITING:
                    raise RequestError(f"{source.field}: too many schemas are being compiled: try again later", 503)
                self._waiting[key] = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, *key)
                self._waiting[key].add_done_callback(lambda done: self._remember(key, done))
            try:
                await asyncio.wait_for(asyncio.shield(self._waiting[key]), WAITING_SECONDS)
            except TooMuch as error:
                raise RequestError(f"{source.field}: {error}", error.status) from None
            except asyncio.TimeoutError:
                raise RequestError(f"{source.field}: other schemas are being compiled: try again later", 503) from None
        found, _ = self._known.get(key, (None, 0))
        if isinstance(found, str) or found is None:
            raise RequestError(f"{source.field}: {found or 'its grammar was forgotten: ask again'}")
        self._known.move_to_end(key)
        return found

    def close(self) -> None:
        """Stop compiling, now and in future."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()

    def _remember(self, key: tuple[str, str], done: "asyncio.Future[Any]") -> None:
        del self._waiting[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._known[key] = done.result()
        while len(self._known) > MOST_GRAMMARS or sum(size for _, size in self._known.values()) > MOST_BYTES:
            self._known.popitem(last=False)

    def _compile(self, kind: str, text: str) -> tuple[Any, int]:
        """Return a compiled grammar, or one line on why there is none, and its bytes. Runs in the thread."""
        try:
            if self._process is None:
                self._info = make_tokenizer_info(self.tokenizer, self.ends)
                self._process = GrammarProcess(self._info.serialize_json(), self.seconds)
            compiled = self._process.compile(kind, text)
            grammar = import_xgrammar().CompiledGrammar.deserialize_json(compiled, self._info)
            return find_begin(grammar), len(compiled)  # its `memory_size_bytes` is a fortieth of what it takes
        except ImportError:
            return NOT_INSTALLED, 0
        except NotCompiled as error:
            return f"it is no schema that can be held to: {name_reason(error)}", 0
        except ValueError as error:
            return one_line(error), 0
        finally:
            compiled = ""
            give_back_memory()
