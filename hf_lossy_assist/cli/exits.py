"""How a command ends: its exit code, and one line on stderr for what users can mend."""

import sys
from typing import Any

import typer

from ..terminal import plain_warnings
from ..validation import HTTP_CLIENTS, one_line, unreached


LONGEST = 600  # characters of an error: the names of all rules and stops fit in
# The base of what typer finds wrong in the words of a command, wherever this release of it keeps that.
WRONG_WORDS: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def run(app: typer.Typer) -> int:
    """Run the command that `sys.argv` names; returns its exit code: 0, 2 for what users can mend, 130 where they interrupted."""
    try:
        with plain_warnings():
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
    if code == 130:
        say("interrupted")
    return code if isinstance(code, int) else 0


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
