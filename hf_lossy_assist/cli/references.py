"""`--reference` of `hf-lossy compare`: how good texts are beside reference texts, by ROUGE and by a judge model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..terminal import console, table
from .figures import NONE
from .options import needs
from .servers import Servers


ROUGE = ("ROUGE-1", "ROUGE-2", "ROUGE-L")


def references_in(given: str | None, servers: Servers) -> list[str]:
    """The names in `--reference`. Raises: `ValueError` or `ImportError`, one line, for a judge without one, and without ROUGE's library."""
    from ..policy.short_form import split_policies

    if given is None:
        if servers.judge_url is not None or servers.judge_model is not None:
            raise ValueError(
                "--judge-url and --judge-model compare texts with an arm's: pass --reference, or leave them out"
            )
        return []
    needs("eval", "rouge_score")
    return list(dict.fromkeys(split_policies(given)))


@contextmanager
def judge_of(servers: Servers) -> Iterator[Any]:
    """The judge model's task while this context lasts; None where no server is named."""
    from ..tasks.judging import QATask

    if servers.judge_url is None and servers.judge_model is None:
        yield None
        return
    with servers.open("judge") as server:
        yield QATask([], server)


def show_quality(found: Sequence[Any]) -> None:
    """Print a row for each reference, arm and batch size: ROUGE, and below what the judge said."""
    rouge, judge = (
        table("", "beside", "batch", *ROUGE),
        table("", "beside", "batch", "won", "tied", "lost", "won or tied"),
    )
    for row in found:
        scores = [_interval(row.rouge.get(name), "{:.2f}") for name in ("rouge1", "rouge2", "rougeL")]
        rouge.add_row(row.arm, row.reference, str(row.batch_size), *scores)
        if row.win_tie is not None:
            counts = map(str, (row.wins, row.ties, row.losses))
            judge.add_row(row.arm, row.reference, str(row.batch_size), *counts, _interval(row.win_tie, "{:.0%}"))
    screen = console(highlight=False)
    screen.print("\ntexts beside references; in brackets 95 % intervals\n")
    for printed in (rouge, judge) if judge.row_count else (rouge,):
        printed.padding = (0, 1, 0, 0)
        screen.print(printed)
        screen.print()


def _interval(figure: Any, form: str) -> str:
    if figure is None:
        return NONE
    span = "" if figure.low is None else f" ({form.format(figure.low)}–{form.format(figure.high)})"
    return form.format(figure.value) + span
