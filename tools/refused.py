"""Check that a wrong use is refused properly: in one line, by this package or a library."""

from collections.abc import Callable
from typing import Any


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
    lines = len(str(error).splitlines())
    return None if lines == 1 else f"{lines} lines"


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
