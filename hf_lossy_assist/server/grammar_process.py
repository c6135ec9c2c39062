"""A process that compiles grammars for the server. It is killed if one takes too long, since a compiling thread cannot be stopped.

A short schema may have a large grammar: `{"type": "string", "maxLength": 100000}` takes xgrammar 0.2.8 hours and all memory. The process loads only
xgrammar.
"""

import ctypes
import json
import multiprocessing
import os
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from ..text.json_schema import hold_characters, ran_out


START_SECONDS = 120  # until the process is ready: it imports torch
COMPILE_SECONDS = 30  # for one grammar
MOST_BYTES = 4 * 2**30  # of the process's memory
MOST_COMPILED = 32 * 2**20  # bytes of a grammar as JSON; it takes as much memory, and ten times that while it is read
MOST_SPACES = 32  # in a row, between the parts of JSON; if allowed, some models write nothing else
THREADS = max((os.cpu_count() or 2) // 2, 1)
SPAWN = multiprocessing.get_context("spawn")


class TooMuch(RuntimeError):
    """A grammar that takes too long or too much memory, on this machine at this time. `status`: of the server's reply."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class GrammarProcess:
    """Compiles one grammar at a time, in a process that is started for the first one, and again after one that took too long.

    Args:
        info: xgrammar's `TokenizerInfo` as JSON.
        seconds: limit for one grammar.
    """

    def __init__(self, info: str, seconds: float = COMPILE_SECONDS):
        self.info, self.seconds = info, seconds
        self.process: Any = None

    def compile(self, kind: str, text: str) -> str:
        """Return a compiled grammar as JSON. `kind`: "schema" or "tags", xgrammar's structural tag. Raises: `ValueError` or `TooMuch`, one line."""
        if self.process is None:
            self._start()
        reply = self._exchange([kind, text], self.seconds)
        limit = f"it takes more than {self.seconds:g} seconds or too much memory to compile"
        if reply is None or "limit" in reply:
            self.close()  # which gives its memory back
            raise TooMuch(f"{reply['limit'] if reply else limit}: ask for less")
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["grammar"]

    def close(self) -> None:
        """Kill the process, if there is one; callable from any thread, even while another one compiles."""
        process, self.process = self.process, None
        if process is not None and process.pid is not None:
            process.kill()
            process.join()

    def _start(self) -> None:
        self._pipe, remote = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(remote, self.info), daemon=True)
        with suppress(OSError):
            self.process.start()
        remote.close()
        if self._exchange(None, START_SECONDS) is None:
            self.close()
            raise TooMuch("the process that compiles grammars did not begin: ask again", 503)

    def _exchange(self, sent: object, seconds: float) -> dict[str, str] | None:
        """Send a value as JSON, unless it is None; return the reply, or None if there is none in time."""
        with suppress(OSError, EOFError):  # the process has ended
            if sent is not None:
                self._pipe.send_bytes(json.dumps(sent).encode())
            if self._pipe.poll(seconds):
                reply: dict[str, str] = json.loads(self._pipe.recv_bytes())
                return reply
        return None


def serve(pipe: Connection, info: str) -> None:
    """Compile what arrives until the server ends. The main function of the process."""
    import xgrammar

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.deserialize_json(info), max_threads=THREADS, cache_enabled=False
    )
    schemas = partial(xgrammar.Grammar.from_json_schema, max_whitespace_cnt=MOST_SPACES)
    makers = {"schema": schemas, "tags": xgrammar.Grammar.from_structural_tag}
    reply: dict[str, str] = {}
    while True:
        pipe.send_bytes(json.dumps(reply).encode())
        compiled, reply = "", {}
        give_back_memory()
        kind, text = json.loads(pipe.recv_bytes())
        _limit()
        try:
            compiled = compiler.compile_grammar(hold_characters(makers[kind](text))).serialize_json()
            reply = {"grammar": compiled}
            if len(compiled) > MOST_COMPILED:
                most = f"{len(compiled) >> 20} MB, and {MOST_COMPILED >> 20} are the most"
                reply = {"limit": f"compiled it has {most} (optional properties multiply each other)"}
        except Exception as error:  # xgrammar's error classes, too
            reply = {"error": " ".join(str(error).split())[:1000]}
            if ran_out(error):
                reply = {"limit": f"it takes more than {MOST_BYTES >> 30} GB of memory to compile"}


def give_back_memory() -> None:
    """Return freed memory to the system, which glibc keeps; other C libraries have no such function."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _limit() -> None:
    """Limit memory and processor time, so that the process ends even if its parent is gone."""
    with suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        most = int(used + COMPILE_SECONDS * THREADS) + 10
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
