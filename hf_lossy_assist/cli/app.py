"""The command `hf-lossy`: which commands there are. how they end is in `_runs`.

Imports inside a command's functions are of what loads torch, Transformers or an optional extra, so that `--help` is quick.
"""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..terminal import show
from . import _runs
from .collect import collect
from .compare import compare
from .eval import evaluate_tasks
from .fit import fit_autojudge, fit_eagle3, fit_specdec, fit_sprinter
from .generate import generate
from .mine import mine
from .profile import profile
from .serve import serve
from .tune import tune
from .without_models import policies, pull, push, report


ORDER = (
    "compare", "generate", "serve", "tune", "policies", "collect", "mine", "fit", "profile", "eval", "report",
    "push", "pull",
)  # fmt: skip


def _show_version(wanted: bool) -> None:
    if wanted:
        show(f"hf-lossy {__version__}")
        raise typer.Exit


class InOrder(TyperGroup):
    """Lists commands in the order of the work: see what is fastest, use it, train what it needs, measure that, share it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


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


for function in (generate, serve, compare, tune, policies, collect, mine, profile, report, push, pull):
    app.command()(function)
app.command("eval")(evaluate_tasks)
app.add_typer(fit_app, name="fit")
fit_app.command("sprinter")(fit_sprinter)
fit_app.command("autojudge")(fit_autojudge)
fit_app.command("specdec")(fit_specdec)
fit_app.command("eagle3")(fit_eagle3)


def main() -> None:
    """Entry point: what users can mend is one line on stderr and exit code 2."""
    sys.exit(_runs.run(app))
