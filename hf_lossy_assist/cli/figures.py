"""The tables of `hf-lossy compare`, for 80 columns."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..terminal import console, digits, show, table


if TYPE_CHECKING:
    from ..evaluation.arm_metrics import ArmMetrics as Figures

NONE = "–"


def show_figures(
    found: "Sequence[Figures]", lines: dict[str, str], left_out: dict[str, str], rounds: bool = False
) -> None:
    """Print the tables of each batch size, and the line of advice that `lines` has for it. `rounds`: the models' precision is below float32."""
    screen = console(highlight=False)
    for size, line in lines.items():
        here = [its for its in found if str(its.batch_size) == size]
        screen.print(f"\nbatch size {size}, {here[0].prompts} prompts; in brackets 95 % intervals\n")
        guarantee = {"guarantee": lambda its: its.guarantee(rounds).replace(" up", "\nup")}
        for columns in (SPEED, ACCEPTANCE | guarantee, ANSWERS):
            cells = {name: [cell(its) for its in here] for name, cell in columns.items()}
            shown = {name: its for name, its in cells.items() if any(text != NONE for text in its)}
            if not shown:
                continue
            printed = table("", *shown)
            for i, its in enumerate(here):
                printed.add_row(its.arm, *(column[i] for column in shown.values()))
            screen.print(printed)
            screen.print()
        show(line)
    for name, why in left_out.items():
        show(f"{name} was not measured: {why}")


def _or_none(value: float | None, form: str) -> str:
    return format(value, form) if value else NONE


def _interval(figure: Any, places: int) -> str:
    if figure.low is None:
        return f"{figure.value:.{places}f}"
    return f"{figure.value:.{places}f} ({figure.low:.{places}f}–{figure.high:.{places}f})"


def _changed(its: "Figures") -> str:
    """What became right and what became wrong, against the target, and how likely that is by chance."""
    return NONE if its.p is None or its.better + its.worse == 0 else f"+{its.better} −{its.worse}, {its.p:.2g}"


# Columns by their heads; one in which no arm has anything is not shown.
SPEED: dict[str, Callable[[Any], str]] = {
    "tokens/s": lambda its: _interval(its.tokens_per_second, digits(its.tokens_per_second.value)),
    "× target": lambda its: "1" if its.arm == "target" else _interval(its.of_target, 2),
    "× assisted": lambda its: _or_none(its.of_assisted and its.of_assisted.value, ".2f"),
    "first, ms": lambda its: _or_none(its.first_token and its.first_token * 1e3, ".0f"),
}
ACCEPTANCE: dict[str, Callable[[Any], str]] = {
    "a call": lambda its: _or_none(its.tokens_per_target_call, ".2f"),
    "accepted": lambda its: _or_none(its.acceptance, ".0%"),
    "lossy": lambda its: _or_none(its.lossy, ".1%"),
    "unchecked": lambda its: _or_none(its.unchecked, ".1%"),
    "same text": lambda its: f"{its.equal}/{its.prompts}",
}
ANSWERS: dict[str, Callable[[Any], str]] = {
    "right": lambda its: NONE if its.right is None else f"{its.right}/{its.judged}",
    "95 %": lambda its: NONE if its.accuracy is None else f"{its.accuracy.low:.0%}–{its.accuracy.high:.0%}",
    "won, lost, p": _changed,
}
