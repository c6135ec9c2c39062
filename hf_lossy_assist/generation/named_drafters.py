"""Drafters by the names that options give: registered ones, and files of trained ones."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .. import demo
from ..artifacts.json_io import parse_json
from ..drafters.auto import AutoDrafter
from ..drafters.base import Drafter, as_drafter
from ..drafters.composite import CompositeDrafter
from ..drafters.io import load_drafter


if TYPE_CHECKING:
    from ..drafters.hidden_state import HiddenStateDrafter

DEMO = "demo"


def is_trained(given: str) -> bool:
    """Return whether a drafter's name is one of files, not of a registered drafter."""
    return given == DEMO or (
        not given.lstrip().startswith("{") and (os.sep in given or "/" in given or Path(given).is_dir())
    )


def load_trained(given: str) -> "HiddenStateDrafter":
    """Load a trained drafter by its name. Raises: `ValueError`, one line, for other drafters; any error of loading."""
    if not is_trained(given):
        raise ValueError(
            f"--drafter {given}: expected a trained drafter's folder, its Hub id or `{DEMO}`; other drafters are for hf-lossy generate and serve"
        )
    return demo.drafter() if given == DEMO else load_drafter(given)


def read_drafter(given: str) -> Drafter | None:
    """Read a drafter: a registered one's name, JSON with the name and parameters, or a trained drafter's folder or Hub id.

    Raises: `ValueError`, one line, if there is none.
    """
    name, plus, files = given.partition("+")
    if plus and name in ("auto", "composite"):
        return (AutoDrafter if name == "auto" else CompositeDrafter)().over(load_trained(files))
    if is_trained(given):
        return load_trained(given)
    return as_drafter(parse_json(given, "--drafter") if given.lstrip().startswith("{") else given)
