"""A process that compiles grammars for the server, and is ended where one takes too long: a thread that compiles cannot be stopped.

A schema may be short and its grammar large: `{"type": "string", "maxLength": 100000}` takes hours and all memory. Only xgrammar is loaded there.
"""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial


START_SECONDS = 120  # for the process to begin: torch is imported
COMPILE_SECONDS = 30  # for one grammar
MOST_BYTES = 4 * 2**30  # of the process's memory
MOST_SPACES = 32  # in a row, between the parts of JSON: some models write nothing else where they may
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")  # of the environment: no keys
THREADS = max((os.cpu_count() or 2) // 2, 1)


class NotCompiled(ValueError):
    """A grammar that is none."""


class TooMuch(RuntimeError):
    """A grammar that takes too long or too much memory, on this machine and now."""


class GrammarProcess:
    """Compiles one grammar at a time, in a process that begins with the first one, and again after one that took too long.

    Args:
        info: xgrammar's `TokenizerInfo` as JSON.
        seconds: for one grammar.
    """

    def __init__(self, info: str, seconds: float = COMPILE_SECONDS):
        self.info, self.seconds = info, seconds
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, kind: str, text: str) -> str:
        """Return a compiled grammar as JSON. `kind`: "schema" or "tags", xgrammar's structural tag. Raises: `NotCompiled` or `TooMuch`, one line."""
        reply = self._exchange(self._process or self._start(), [kind, text], self.seconds)
        if reply is None:
            self.close()
            raise TooMuch(f"it takes more than {self.seconds:g} seconds or too much memory to compile: ask for less")
        if "error" in reply:
            raise NotCompiled(reply["error"])
        return reply["grammar"]

    def close(self) -> None:
        """End the process, if there is one; from any thread, also while another one compiles."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError, ValueError):  # what was on its way
                    assert pipe is not None
                    pipe.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        # Not `-m`: it would look for modules in the working directory first.
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
            raise TooMuch("the process that compiles grammars did not begin: ask again")
        return process

    @staticmethod
    def _exchange(process: "subprocess.Popen[bytes]", sent: object, seconds: float) -> dict[str, str] | None:
        """Send a line of JSON and return the one that comes back; None where the process ended, or did not answer in time and is ended."""
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
    """Compile what comes in, a line each, until nothing more will come. The process's own work."""
    import xgrammar

    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no reply
    info = xgrammar.TokenizerInfo.deserialize_json(json.loads(sys.stdin.buffer.readline()))
    compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
    schemas = partial(compiler.compile_json_schema, max_whitespace_cnt=MOST_SPACES)
    compilers = {"schema": schemas, "tags": compiler.compile_structural_tag}
    replies.write(b"{}\n")
    replies.flush()
    for line in sys.stdin.buffer:
        _limit()
        kind, text = json.loads(line)
        try:
            reply = {"grammar": compilers[kind](text).serialize_json()}
        except Exception as error:  # xgrammar's own kinds, too
            reply = {"error": " ".join(str(error).split())[:1000]}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _limit() -> None:
    """Bound memory, and processor time: the process ends by itself where nobody is left to end it."""
    with suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        most = int(used + COMPILE_SECONDS * THREADS) + 10
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
