"""How a command ends: its exit code, and one line on stderr for what users can mend."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import typer

from ..terminal import plain_warnings, show
from ..validation import HTTP_CLIENTS, check_positive, one_line, unreached


LONGEST = 600  # characters of an error: the names of all rules and stops fit in
# The base of what typer finds wrong in the words of a command, wherever this release of it keeps that.
WRONG_WORDS: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def run(app: typer.Typer) -> int:
    """Run the command that `sys.argv` names; returns its exit code: 0, 2 for what users can mend, 130 where they interrupted, 143 where SIGTERM did."""
    _signals.clear()
    try:
        with plain_warnings(), _one_voice(), _ending():
            code = app(standalone_mode=False)  # or else typer draws a frame around what it finds wrong
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except WRONG_WORDS as error:
        _say_wrong_words(error)
        return 2
    except (ValueError, TypeError, OSError, ImportError) as error:
        say(str(error))
        return 2
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in HTTP_CLIENTS:
            raise
        say(f"the Hub was not reached ({unreached(error)})")
        return 2
    if code == 130 and _signals:
        say("ended by SIGTERM, or because its time was over")
        return 143
    if code == 130:
        say("interrupted")
    return code if isinstance(code, int) else 0


_timers: list[threading.Timer] = []
_signals: list[int] = []  # SIGTERM, if it came


def end_after(hours: float | None) -> None:
    """End the command that runs as SIGTERM would, so many hours from now; None: never."""
    if hours is None:
        return
    check_positive("--max-hours", hours, 24 * 365)
    timer = threading.Timer(hours * 3600, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    _timers.append(timer)
    timer.start()


@contextmanager
def going_on(out: Path) -> Iterator[None]:
    """Where this is interrupted, say how to go on, if the unfinished run of `out` has begun."""
    try:
        yield
    except KeyboardInterrupt:
        if (part := Path(f"{out}.partial")).is_dir():
            show(f"interrupted; what is done is in {part}: the same command with --resume goes on")
        raise


@contextmanager
def _ending() -> Iterator[None]:
    """SIGTERM, from a scheduler or from `end_after`, ends a job as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # where Python takes no signals
        yield
        return

    def end(number: int, *_: Any) -> None:
        _signals.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        while _timers:
            _timers.pop().cancel()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _one_voice() -> Iterator[None]:
    """Of the processes that `accelerate launch` started the first one speaks: of the others errors alone are heard."""
    if int(os.environ.get("RANK", "0")) == 0:
        yield
        return
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def _say_wrong_words(error: Any) -> None:
    text = error.format_message()
    if (
        type(error).__name__ == "NoArgsIsHelpError"
    ):  # the command alone: the text is its help, which typer may have shown by now
        print(text, end="\n" if text else "")
        return
    context = getattr(error, "ctx", None)
    say(text if context is None else f"{text.rstrip('.')}; see {context.command_path} --help")


def say(text: str) -> None:
    """One line on stderr that no terminal acts on, however long or wild a name in it is."""
    print(f"hf-lossy: {one_line(text, LONGEST)}", file=sys.stderr)
