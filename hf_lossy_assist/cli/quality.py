"""`hf-lossy quality`: how good the texts of a comparison are, where no answer is right or wrong."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from ..terminal import console, show_json
from ..validation import check_int
from .measured import hash_of, source_of
from .options import DEMO, AsJson, Seed, Shots, needs


def quality(
    folder: Annotated[Path, typer.Argument(help="a folder that compare wrote with --out")],
    task: Annotated[
        str, typer.Option(help="the task that was compared on: lm1b, wikitext, mt_bench, spec_bench, …")
    ] = DEMO,
    data: Annotated[Path | None, typer.Option(help="its --data, if it had one")] = None,
    against: Annotated[str, typer.Option(help="the arm that the others are judged beside")] = "target",
    judge_url: Annotated[str | None, typer.Option(help="server with a judge model (default: ROUGE alone)")] = None,
    judge_model: Annotated[str | None, typer.Option(help="name of the judge on that server")] = None,
    per_minute: Annotated[float | None, typer.Option(help="most requests a minute")] = None,
    timeout: Annotated[float, typer.Option(help="seconds to wait for the server's reply")] = 120.0,
    shots: Shots = 0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare texts that compare wrote: ROUGE against the task's references, and wins and ties by a judge model in both orders.

    Examples:

      hf-lossy quality found --task lm1b --data news.txt

      hf-lossy quality found --task mt_bench --against strict --judge-url http://localhost:8000/v1 --judge-model J
    """
    needs("train", "scipy")
    check_int("--seed", seed, 0)
    from ..evaluation.quality import qualities
    from ..evaluation.report import read_run
    from ..tasks.judging import QATask
    from ..tasks.shots import SHOTS
    from ..tasks.tasks import task_named
    from .servers import Servers

    check_int("--shots", shots, 0, len(SHOTS))
    servers = Servers(
        target_url=None, target_model=None, judge_url=judge_url, judge_model=judge_model, per_minute=per_minute, timeout=timeout,
    )  # fmt: skip
    run = read_run(folder)
    source = source_of(task, data, shots)
    known = run.record.get("problems")
    if not isinstance(known, dict) or not known.get("count"):
        raise ValueError(
            f"{folder} was compared on prompts without a task, or by an earlier version: there is nothing to judge its texts by; compare with --task"
        )
    if run.record["source"] != source:
        raise ValueError(
            f"{folder} was compared on {run.record['source']}, not on {source}: pass its --task, --data and --shots"
        )
    problems = task_named(task, data=data, seed=seed, shots=shots).problems(known["count"])
    if hash_of([its.prompt for its in problems], problems) != known["sha256"]:
        raise ValueError(
            f"{folder}: {source} has other problems now than when it was compared on: pass the same --data, unchanged, and --seed"
        )
    with ExitStack() as opened:
        judge = None
        if judge_url is not None or judge_model is not None:
            judge = QATask([], opened.enter_context(servers.open("judge")))
        found = qualities(run.answers, problems, judge=judge, against=against)
    if as_json:
        show_json({"quality": [its.to_dict() for its in found]})
        return
    _show(found, against)


def _show(found: Any, against: str) -> None:
    """A row for each arm and batch size."""
    heads = ["batch", "prompts", "ROUGE-1", "ROUGE-2", "ROUGE-L", "won", "tied", "lost", f"won or tied, of {against}"]
    table = Table("", *(Column(head, justify="right") for head in heads), box=None, padding=(0, 1, 0, 0))
    for its in found:
        means = [_cell(its.rouge.get(name), "{:.3f}") for name in ("rouge1", "rouge2", "rougeL")]
        judged = its.win_tie is not None
        counts = [str(count) if judged else "–" for count in (its.wins, its.ties, its.losses)]
        table.add_row(its.arm, str(its.batch_size), str(its.prompts), *means, *counts, _cell(its.win_tie, "{:.0%}"))
    console(highlight=False).print(table)


def _cell(figure: Any, form: str) -> str:
    if figure is None:
        return "–"
    return form.format(figure.value) + (
        "" if figure.low is None else f" ({form.format(figure.low)}–{form.format(figure.high)})"
    )
