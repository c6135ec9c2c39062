"""A process that compiles grammars for the server. It is killed if one takes too long, since a compiling thread cannot be stopped.

A short schema may have a large grammar: `{"type": "string", "maxLength": 100000}` takes xgrammar 0.2.8 hours and all memory. The process loads only
xgrammar.
"""

import ctypes
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial

from ..text.json_schema import hold_characters, ran_out


START_SECONDS = 120  # until the process is ready: it imports torch
COMPILE_SECONDS = 30  # for one grammar
MOST_BYTES = 4 * 2**30  # of the process's memory
MOST_COMPILED = (
    32 * 2**20
)  # bytes of a compiled grammar as JSON; it takes as much memory, and ten times that while it is read
MOST_SPACES = 32  # in a row, between the parts of JSON; if allowed, some models write nothing else
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")  # of the environment: no keys
THREADS = max((os.cpu_count() or 2) // 2, 1)


class NotCompiled(ValueError):
    """An invalid grammar."""


class TooMuch(RuntimeError):
    """A grammar that takes too long or too much memory, on this machine at this time."""

    status = 400  # of the server's reply


class GrammarProcess:
    """Compiles one grammar at a time, in a process that is started for the first one, and again after one that took too long.

    Args:
        info: xgrammar's `TokenizerInfo` as JSON.
        seconds: limit for one grammar.
    """

    def __init__(self, info: str, seconds: float = COMPILE_SECONDS):
        self.info, self.seconds = info, seconds
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, kind: str, text: str) -> str:
        """Return a compiled grammar as JSON. `kind`: "schema" or "tags", xgrammar's structural tag. Raises: `NotCompiled` or `TooMuch`, one line."""
        reply = self._exchange(self._process or self._start(), [kind, text], self.seconds)
        limit = f"it takes more than {self.seconds:g} seconds or too much memory to compile"
        if reply is None or "limit" in reply:
            self.close()  # which gives its memory back
            raise TooMuch(f"{reply['limit'] if reply else limit}: ask for less")
        if "error" in reply:
            raise NotCompiled(reply["error"])
        return reply["grammar"]

    def close(self) -> None:
        """Kill the process, if there is one; callable from any thread, even while another one compiles."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError, ValueError):  # data that was not sent
                    assert pipe is not None
                    pipe.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        # Not `-m`, which would search the working directory for modules first.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._exchange(process, self.info, START_SECONDS) is None:
            self.close()
            error = TooMuch("the process that compiles grammars did not begin: ask again")
            error.status = 503
            raise error
        return process

    @staticmethod
    def _exchange(process: "subprocess.Popen[bytes]", sent: object, seconds: float) -> dict[str, str] | None:
        """Send a line of JSON and return the reply; None if the process has ended, or was killed because it did not reply in time."""
        assert process.stdin is not None and process.stdout is not None
        clock = threading.Timer(seconds, process.kill)
        clock.start()
        try:
            process.stdin.write(json.dumps(sent).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # it has ended, or its pipes were closed
            return None
        finally:
            clock.cancel()
        reply: dict[str, str] | None = json.loads(line) if line.endswith(b"\n") else None
        return reply


def serve() -> None:
    """Compile what arrives, one line each, until the input ends. The main function of the process."""
    import xgrammar

    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps the output of libraries out of the replies
    info = xgrammar.TokenizerInfo.deserialize_json(json.loads(sys.stdin.buffer.readline()))
    compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
    schemas = partial(xgrammar.Grammar.from_json_schema, max_whitespace_cnt=MOST_SPACES)
    makers = {"schema": schemas, "tags": xgrammar.Grammar.from_structural_tag}
    replies.write(b"{}\n")
    replies.flush()
    for line in sys.stdin.buffer:
        _limit()
        kind, text = json.loads(line)
        try:
            compiled = compiler.compile_grammar(hold_characters(makers[kind](text))).serialize_json()
            reply = {"grammar": compiled} if len(compiled) <= MOST_COMPILED else {"limit": _name_size(len(compiled))}
        except Exception as error:  # xgrammar's error classes, too
            reply = {"error": " ".join(str(error).split())[:1000]}
            if ran_out(error):
                reply = {"limit": f"it takes more than {MOST_BYTES >> 30} GB of memory to compile"}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
        compiled, reply = "", {}
        give_back_memory()


def _name_size(size: int) -> str:
    return f"compiled it has {size >> 20} MB, and {MOST_COMPILED >> 20} are the most (optional properties multiply each other)"


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
