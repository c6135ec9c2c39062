"""`hf-lossy push`: a folder that this package made, to the Hub."""

from pathlib import Path
from typing import Annotated

import typer

from ..terminal import show
from .options import Revision, Token


def push(
    path: Annotated[Path, typer.Argument(help="folder of a head, a policy, models, a dataset or custom_generate")],
    repo_id: Annotated[str, typer.Argument(help="repository on the Hub: org/name")],
    private: Annotated[bool, typer.Option("--private", help="make a new repository private")] = False,
    revision: Revision = None,
    message: Annotated[str | None, typer.Option(help="commit message")] = None,
    token: Token = None,
) -> None:
    """Upload a folder to the Hub, after a check that it loads and holds no pickle.

    Example:

      hf-lossy push head org/name --private
    """
    from ..policy import sharing

    show(sharing.push(path, repo_id, private=private or None, token=token, message=message, revision=revision))
