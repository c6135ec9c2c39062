"""`hf-lossy pull`: a repository of the Hub, checked."""

from pathlib import Path
from typing import Annotated

import typer

from ..terminal import show
from .options import Revision, Token


def pull(
    repo_id: Annotated[str, typer.Argument(help="org/name, org/name@revision or datasets/org/name")],
    out: Annotated[Path | None, typer.Option(help="folder to copy it into; must not exist")] = None,
    revision: Revision = None,
    token: Token = None,
    local_files_only: Annotated[
        bool, typer.Option("--local-files-only", help="use the local cache and no network")
    ] = False,
    force_download: Annotated[
        bool, typer.Option("--force-download", help="download again what is in the cache")
    ] = False,
) -> None:
    """Download a head, a policy, models or a dataset from the Hub, check them, and print the folder.

    Examples:

      hf-lossy pull org/name --out head

      hf-lossy pull datasets/org/name --out data
    """
    from ..policy import sharing

    if local_files_only and force_download:
        raise ValueError("--local-files-only and --force-download contradict each other: pass one of them")
    where = {"local_files_only": local_files_only, "force_download": force_download}
    show(sharing.pull(repo_id, out, revision=revision, token=token, **where))
