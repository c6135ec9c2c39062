"""The verdict on a case: refused in one line of this package, accepted and right, or anything else."""

import faulthandler
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_lossy_assist as hla


REFUSED, RIGHT, ELSE = "refused in one line", "accepted and right", "anything else"
PACKAGE = Path(hla.__file__).resolve().parent
LONGEST = 620  # characters of a refusal: the names of all rules and stops are 500
STARVED = 5  # times as long may a case take that hardly had the processor
LARGEST = 2**28  # bytes that a case may take more than all before it


@dataclass(frozen=True)
class Case:
    """A case. `call` raises what a user would see, returns if the use was accepted and right, and raises `Wrong` otherwise."""

    what: str
    call: Callable[[], None]


class Wrong(Exception):
    """The use was accepted, and the result is not right."""


class Refused(Exception):
    """A refusal that is not an exception for its user: the line that a command printed."""


class Late(BaseException):
    """The case's time is over."""


@dataclass(frozen=True)
class Verdict:
    """One of the three outcomes, and the evidence."""

    kind: str
    seen: str
    trace: str = ""


def judge(case: Case, seconds: float) -> Verdict:
    """Run a case. One that takes longer than `seconds`, or a gigabyte, is neither refused nor right."""
    memory, verdict = _peak(), _judged(case, seconds)
    if _peak() - memory > LARGEST:
        return Verdict(ELSE, f"{(_peak() - memory) >> 20} MiB of memory: {verdict.kind}, {verdict.seen}")
    return verdict


def _judged(case: Case, seconds: float) -> Verdict:
    trace = ""
    try:
        with _limited(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.call()
    except Late:
        return Verdict(ELSE, f"no end within {seconds:g} s")
    except Wrong as found:
        return Verdict(ELSE, str(found))
    except Refused as found:
        wrong, line = fault_of_line(str(found)), str(found)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        wrong, line = fault(error), f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_tb(error.__traceback__, limit=8))
    else:
        return Verdict(RIGHT, "")
    return Verdict(ELSE, f"{wrong}: {line[:1500]}", trace) if wrong else Verdict(REFUSED, line, trace)


def _peak() -> int:
    """Return the peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fault(error: BaseException) -> str | None:
    """Return what is wrong with a refusal, or None."""
    if not isinstance(error, ValueError | TypeError | OSError | ImportError):
        return f"a {type(error).__name__} from {_place(error)}"
    if not _innermost(error).is_relative_to(PACKAGE):
        return f"found out only in {_place(error)}"
    return fault_of_line(str(error))


def fault_of_line(text: str) -> str | None:
    """Return what is wrong with a refusal's text, or None."""
    if not text.strip():
        return "no text"
    if len(text.splitlines()) != 1:
        return f"{len(text.splitlines())} lines"
    if len(text) > LONGEST:
        return f"{len(text)} characters"
    if not text.isprintable():
        return "characters that a terminal acts on"
    return None


def _innermost(error: BaseException) -> Path:
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()


def _place(error: BaseException) -> str:
    frame, file = traceback.extract_tb(error.__traceback__)[-1], _innermost(error)
    return f"{file.parent.name}/{file.name}:{frame.lineno}"


@contextmanager
def _limited(seconds: float) -> Any:
    """Raise `Late` after so many seconds, or later if other programs had the processor.

    If that does not end it, the process ends with every thread's traceback.
    """
    began, worked = time.monotonic(), time.process_time()

    def late(*_: Any) -> None:
        if time.process_time() - worked > seconds / 2 or time.monotonic() - began > STARVED * seconds:
            raise Late
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, late)
    left = signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(10 * seconds, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, before)
