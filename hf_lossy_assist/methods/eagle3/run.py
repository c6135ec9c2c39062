"""`fit` as a job: a folder that a killed run is gone on with, several processes, and a drafter in files with its card in the end."""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from huggingface_hub import ModelCard

from ...artifacts.cards import drafter_card, write_card
from ...artifacts.files import new_folder, write_text
from ...drafters.eagle import Eagle3Drafter
from ...drafters.io import save_drafter
from ...models.identity import ModelIdentity, versions
from ...stats.intervals import Estimate
from ...training.processes import Processes
from ...training.resumable import clear, compute_key, folders, start_run
from .checkpoints import Checkpoints
from .data import Texts
from .fit import Report, check_lengths, fit, record_of
from .settings import DEFAULTS, FitSettings


RECORD = "fit.json"


def fit_eagle3(
    target: Any, data: str | Path, out: str | Path, settings: FitSettings = DEFAULTS, *, resume: bool = False
) -> tuple[Eagle3Drafter, Report | None]:
    """Train a drafter for `target` on what `collect` wrote into `data`, and write it to `out`: the form of `speculators`, with a card.

    A checkpoint is written every `settings.save_every` steps into `out`.partial, from which `resume` goes on. Processes that `accelerate
    launch` started share each batch.

    Returns: the drafter, and in the first process its figures on held-out texts. Raises: `ValueError`, one line.
    """
    out, part = folders(out)
    texts = Texts(data, target)
    check_lengths(texts, settings)
    processes = Processes.started()
    accelerator = Accelerator(cpu=target.device.type == "cpu")
    facts = record_of(settings, texts)

    def write() -> None:
        assert report is not None, "the first process has measured"
        with new_folder(out) as folder:
            save_drafter(drafter, folder, target, embeddings=False)
            write_text(
                folder / RECORD, json.dumps(facts | figures(report) | {"versions": versions()}, indent=2) + "\n"
            )
            write_card(card(facts, report), folder / "README.md")
        clear(part, RECORD)

    with start_run(out, part, facts, RECORD, resume=resume, processes=processes) as unfinished:
        if not unfinished:
            raise ValueError(f"{out} is finished: there is nothing to go on with")
        checkpoints = Checkpoints(part, compute_key(part / RECORD))
        drafter, report = fit(target, texts, settings, checkpoints, processes, accelerator)
        processes.on_first(write)
    return drafter, report


def figures(report: Report) -> dict[str, Any]:
    """A report as JSON has it."""
    return {
        "acceptance": [None if its is None else list(its) for its in report.acceptance],
        "tokens_per_call": list(report.tokens_per_call),
        "held_out_texts": report.texts,
    }


def card(facts: dict[str, Any], report: Report) -> ModelCard:
    """The README.md of a drafter."""
    rows = [(str(k + 1), _interval(its, 100, "%.1f %%")) for k, its in enumerate(report.acceptance)]
    return drafter_card(
        ModelIdentity.from_dict(facts["target"]), facts=facts, rows=rows, tokens=_interval(report.tokens_per_call, 1, "%.2f"),
        texts=report.texts, settings=", ".join(f"{name} {value}" for name, value in facts["settings"].items() if value is not None),
        versions=", ".join(f"{name} {value}" for name, value in versions().items()),
    )  # fmt: skip


def _interval(its: Estimate | None, factor: float, form: str) -> str:
    """An estimate as a table shows it."""
    if its is None:
        return "no draft came to it"
    value = form % (factor * its.value)
    if its.low is None or its.high is None:
        return f"{value} (too few texts for an interval)"
    return f"{value} ({form % (factor * its.low)} to {form % (factor * its.high)})"
