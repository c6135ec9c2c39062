"""`--drafter`: what drafts in the place of a draft model. What it names, and the models that run with it."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_lossy_assist as hla

from .made_with import MadeWith
from .options import DEMO, INT8, TARGET, check_pair, load


Drafter = Annotated[
    str | None,
    typer.Option(help=f"a trained drafter in place of the draft model: a folder, a Hub id, or `{DEMO}`, the demo's"),
]


def check_draft(model: str | None, assistant: str | None, drafter: str | None) -> None:
    """A draft model beside the target, or a drafter in its place."""
    if drafter is None:
        check_pair(model, assistant)
    elif assistant is not None:
        raise ValueError("--drafter and --assistant are two drafts: pass one of them")
    elif drafter == DEMO and model is not None:
        raise ValueError(
            f"--drafter {DEMO} is the drafter of the demo's target: leave --model out, or pass a folder or Hub id"
        )


def check_compiled(compiled: bool, made: MadeWith) -> None:
    """Rounds of a drafter on the target's states are eager: hooks read the states."""
    if compiled and made.drafter is not None:
        raise ValueError(
            "--compile: rounds that read the target's hidden states are not compiled: leave it out beside --drafter"
        )


def is_trained(given: str) -> bool:
    """Whether `--drafter` names files, and no registered drafter."""
    return given == DEMO or (
        not given.lstrip().startswith("{") and (os.sep in given or "/" in given or Path(given).is_dir())
    )


def trained(given: str) -> Any:
    """The trained drafter that `--drafter` names. Raises: `ValueError`, one line, for other drafters; what loading raises."""
    from ..drafters.loading import load_drafter

    if not is_trained(given):
        raise ValueError(
            f"--drafter {given}: expected a trained drafter's folder, its Hub id or `{DEMO}`; other drafters are for hf-lossy generate"
        )
    return hla.demo.drafter() if given == DEMO else load_drafter(given)


def load_made(made: MadeWith, dtype: str, device: str, overrides: list[str] | None = None) -> tuple[Any, Any, Any]:
    """Target, what drafts, and tokenizer; in int8 both are. `overrides`: `--set`. Raises: one line for another target's."""
    if made.drafter is None:
        return load(made.model, made.assistant, dtype, device, overrides)
    drafter = trained(made.drafter)
    target, _, tokenizer = load(made.model, None, dtype, device, overrides)
    if dtype == INT8:
        drafter = drafter.int8()
    drafter.check(target)
    return target, drafter, tokenizer


def read_drafter(given: str | None, policy: str, model: str | None, assistant: str | None) -> "hla.Drafter | None":
    """`--drafter`: a registered drafter's name, JSON with the name and parameters, or a trained drafter's folder or Hub id.

    Raises: one line where it does not fit the rest.
    """
    from ..artifacts.json_io import parse_json as parse
    from ..drafters.base import as_drafter

    drafter: hla.Drafter | None = None
    if given is not None and is_trained(given):
        drafter = trained(given)
    elif given is not None:
        drafter = as_drafter(parse(given, "--drafter") if given.lstrip().startswith("{") else given)
    if policy == TARGET:
        if drafter is not None:
            raise ValueError(f"--drafter drafts, and --policy {TARGET} has no draft: leave one of them out")
    elif drafter is None or drafter.needs_assistant:
        check_pair(model, assistant)
    elif assistant is not None:
        raise ValueError(f"--drafter {given} drafts without a model: leave --assistant out")
    return drafter
