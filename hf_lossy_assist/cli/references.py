"""`--reference` of `hf-lossy compare`: how good texts are beside reference texts, by ROUGE and by a judge model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..terminal import console, table
from .figures import NONE
from .options import needs, open_endpoint


ROUGE = ("ROUGE-1", "ROUGE-2", "ROUGE-L")


def references_in(given: str | None, judge_url: str | None, judge_model: str | None) -> list[str]:
    """The names in `--reference`. Raises: `ValueError` or `ImportError`, one line, for a judge without one, and without ROUGE's library."""
    from ..policy.short_form import split_policies

    if given is None:
        if judge_url is not None or judge_model is not None:
            raise ValueError(
                "--judge-url and --judge-model compare texts with an arm's: pass --reference, or leave them out"
            )
        return []
    needs("eval", "rouge_score")
    return list(dict.fromkeys(split_policies(given)))


@contextmanager
def opened_judge(judge_url: str | None, judge_model: str | None, timeout: float) -> Iterator[Any]:
    """Connect to a judge model while this context lasts: its task, or None where no server is named."""
    from ..tasks.open_ended import QATask

    if judge_url is None and judge_model is None:
        yield None
        return
    with open_endpoint("judge", judge_url, judge_model, timeout) as server:
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
