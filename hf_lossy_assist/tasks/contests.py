"""Programming contests: LiveCodeBench (Jain et al. 2024), whose tests are run where HumanEval's are."""

import base64
import json
import pickletools
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from ..artifacts.reading import parse
from ..validation import one_line, shown
from .answers import Data, Problem, Row
from .programs import PASSED, CodeTask, fenced


LARGEST = 1 << 28  # bytes of a line, and of a row's unpacked tests
KINDS = ("stdin", "functional")


FRAMES = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}  # what may stand around a pickled text


def _text_in(data: bytes) -> str:
    """The text that a pickle is of. It is taken apart and never run. Raises: `ValueError` for one of anything else."""
    steps = list(pickletools.genops(data))
    texts = [value for step, value, _ in steps if step.name not in FRAMES]
    if (
        len(texts) != 1
        or not isinstance(texts[0], str)
        or not all("UNICODE" in s.name or s.name in FRAMES for s, *_ in steps)
    ):
        raise ValueError("expected the pickle of a text")
    return texts[0]


def unpacked(text: str, where: str) -> list[Any]:
    """The tests that a row holds as JSON, or as LiveCodeBench packs its hidden ones: base64 of zlib of a pickled JSON text."""
    if not text.lstrip().startswith("["):
        try:
            stream = zlib.decompressobj()
            data = stream.decompress(base64.b64decode(text, validate=True), LARGEST)
            if stream.unconsumed_tail:
                raise ValueError(f"more than {LARGEST} bytes when unpacked")
            text = _text_in(data)
        except Exception as error:  # what a pickle that was tampered with raises is of any kind
            raise ValueError(f"{where}: the packed tests cannot be read: {one_line(error)}") from None
    found = parse(text, where)
    if not isinstance(found, list):
        raise ValueError(f"{where}: expected a list of tests, got {shown(found)}")
    return found


class LiveCodeBench(CodeTask):
    """Problems of programming contests: the rows of LiveCodeBench's code generation, as JSON lines or from the Hub.

    The tests are the row's public and hidden ones. Where `metadata` names a function it is called, else the program reads
    its input and prints. The answer of a response is the outcome of its last fenced block, as for `CodeTask`, and what is
    said there of running programs holds here. `timeout`: seconds for all tests of a program together.
    """

    name = "livecodebench"
    longest = LARGEST

    def __init__(
        self, path: Data, timeout: float = 60.0, *, allow_code_execution: bool = False, sandbox: bool | None = None
    ):
        super().__init__(path, timeout, chat=True, allow_code_execution=allow_code_execution, sandbox=sandbox)

    def problem(self, row: Row) -> Problem:
        facts = parse(row.optional("metadata") or "{}", f"{row.where}, metadata")
        name = facts.get("func_name") if isinstance(facts, dict) else None
        if not isinstance(name, str | None):
            raise ValueError(f"{row.where}: expected a function's name under 'func_name', got {shown(name)}")
        tests = [test for field in ("public_test_cases", "private_test_cases") for test in _tests(row, field)]
        if not tests:
            raise ValueError(f"{row.where}: expected at least one test, got none")
        starter = row.optional("starter_code")
        extra = {
            "prompt": "", "entry_point": "SOURCE", "test": _checking(name, tests), "question_id": row.optional("question_id"),
            "difficulty": row.optional("difficulty"), "platform": row.optional("platform"),
        }  # fmt: skip
        return Problem(_request(row.text("question_content"), starter), PASSED, extra)

    def continuation(self, response: str, name: str) -> str | None:
        blocks = fenced(response)
        return f"SOURCE = {blocks[-1]!r}\n" if blocks else None


def _request(question: str, starter: str | None) -> str:
    """What the model is given."""
    if starter is None:
        how = "Write a Python program that reads its input from standard input and prints what is asked for."
        return f"{question}\n\n{how} Reply with the whole program in one fenced block."
    how = "Complete this Python code. Reply with the whole code in one fenced block."
    return f"{question}\n\n{how}\n\n```python\n{starter.rstrip()}\n```"


def _tests(row: Row, field: str) -> list[dict[str, str]]:
    """One field's tests; `ValueError` with file and line where one is not a pair of texts."""
    packed = row.values.get(field)
    if not isinstance(packed, str):
        raise ValueError(f"{row.where}: expected a text under {field!r}, got {shown(packed)}")
    where = f"{row.where}, {field}"
    found = []
    for test in unpacked(packed, where):
        its = test if isinstance(test, dict) else {}
        pair = {side: its[side] for side in ("input", "output") if isinstance(its.get(side), str)}
        if len(pair) < 2 or its.get("testtype", KINDS[0]) not in KINDS:
            raise ValueError(f"{where}: expected tests with the texts `input` and `output`, got {shown(test)}")
        found.append(pair)
    return found


def _checking(name: str | None, tests: list[dict[str, str]]) -> str:
    """The definition of `check` that a HumanEval row ends with."""
    given = f"_json.loads({json.dumps(tests)!r})"
    call = f"check_program(source, {given})" if name is None else f"check_calls(source, {name!r}, {given})"
    return f"{_harness()}\nimport json as _json\n\n\ndef check(source):\n    {call}\n"


@cache
def _harness() -> str:
    return Path(__file__).with_name("contest_check.py").read_text(encoding="utf-8")
