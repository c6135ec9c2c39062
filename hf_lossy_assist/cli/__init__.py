"""The command `hf-lossy` and the list of its commands, which share the files that begin with an underscore.

Commands refer to what loads torch by its subpackage, which imports a module on first use, so that `--help` is fast.
"""

import signal
import sys
import threading
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..terminal import show
from . import _runs
from .data_commands import collect_command, mine_command, profile_command
from .fit_command import (
    fit_autojudge_command,
    fit_dspark_command,
    fit_eagle3_command,
    fit_specdec_command,
    fit_sprinter_command,
)
from .measure_commands import compare_command, report_command, tune_command
from .without_models import policies_command, pull_command, push_command, suggest_command
from .write_commands import generate_command, serve_command


# In the order of use: compare what is fastest, use it, train what it needs, measure that, share it. None: a group.
COMMANDS = {
    "compare": compare_command, "generate": generate_command, "serve": serve_command, "tune": tune_command,
    "policies": policies_command, "suggest": suggest_command, "collect": collect_command, "mine": mine_command, "fit": None,
    "profile": profile_command,
    "report": report_command, "push": push_command, "pull": pull_command,
}  # fmt: skip
FITS = {
    "sprinter": fit_sprinter_command,
    "autojudge": fit_autojudge_command,
    "specdec": fit_specdec_command,
    "eagle3": fit_eagle3_command,
    "dspark": fit_dspark_command,
}


def _show_version(wanted: bool) -> None:
    if wanted:
        show(f"hf-lossy {__version__}")
        raise typer.Exit


class InOrder(TyperGroup):
    """Lists commands in the order of `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=list(COMMANDS).index)


app = typer.Typer(
    cls=InOrder,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
FIT = """Train a head or a drafter on collected data.

Examples:

  hf-lossy fit sprinter data --out head

  hf-lossy fit autojudge mined --out judge

  hf-lossy fit eagle3 texts --out drafter
"""
fit_app = typer.Typer(help=FIT, no_args_is_help=True)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version and nothing else", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Assisted generation for Hugging Face Transformers: faster, batched, measured.

    Examples:

      hf-lossy compare

      hf-lossy generate --policy svip

      hf-lossy COMMAND --help
    """


app.add_typer(fit_app, name="fit")
for group, commands in ((app, COMMANDS), (fit_app, FITS)):
    for name, function in commands.items():
        if function is not None:
            group.command(name)(function)


def main() -> None:
    """Run the command; user errors are printed as one line on stderr, with exit code 2. SIGTERM ends it as Ctrl-C does."""
    if threading.current_thread() is threading.main_thread():  # only the main thread receives signals
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(_runs.run(app))
