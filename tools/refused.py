"""Check that a wrong use is refused properly: in one line, with a `ValueError` or `TypeError`, by this package."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_lossy_assist as hla


PACKAGE = Path(hla.__file__).resolve().parent


def refusal(call: Callable[[], Any]) -> Exception | None:
    """Return what a wrong use raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


def fault(error: Exception | None) -> str | None:
    """Return what is wrong with a refusal, or None."""
    if error is None:
        return "it was accepted"
    if not isinstance(error, ValueError | TypeError):
        return f"a {type(error).__name__}, neither ValueError nor TypeError"
    if len(str(error).splitlines()) != 1:
        return f"{len(str(error).splitlines())} lines"
    innermost = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    return None if innermost.is_relative_to(PACKAGE) else f"found out only in {innermost.parent.name}/{innermost.name}"


def main(cases: dict[str, Callable[[], Any]]) -> int:
    faults = 0
    for number, (name, call) in enumerate(cases.items(), 1):
        error = refusal(call)
        message = "".join(str(error).splitlines()[:1])
        print(f"{number:2d} {name}: {type(error).__name__}: {message}")
        if wrong := fault(error):
            faults += 1
            print(f"   NOT AS IT SHOULD BE: {wrong}")
    print(f"{len(cases)} wrong uses, {faults} not refused as they should be")
    return 1 if faults else 0
