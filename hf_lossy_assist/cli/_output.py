"""What commands print: the tables of `compare` and of its `--reference`, the texts of `generate`, the verdict that `fit` ends with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

import hf_lossy_assist as hla

from ..models.texts import continuation, pieces, special_tokens
from ..terminal import console, digits, show, table


if TYPE_CHECKING:
    from ..evaluation.arm_metrics import ArmMetrics
    from ..stats.speculation import SpeculationStats
    from ..training.head_quality import Evidence

NONE = "–"
ROUGE = ("ROUGE-1", "ROUGE-2", "ROUGE-L")
COLOURS = ("green", "magenta", "bold yellow", "cyan")  # of stats.report.SOURCES


def show_figures(
    found: "Sequence[ArmMetrics]", lines: dict[str, str], left_out: dict[str, str], rounds: bool = False
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


def _changed(its: "ArmMetrics") -> str:
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


def show_quality(found: Sequence[Any]) -> None:
    """Print a row for each reference, arm and batch size: ROUGE, and below what the judge said."""
    rouge, judge = (
        table("", "beside", "batch", *ROUGE),
        table("", "beside", "batch", "won", "tied", "lost", "won or tied"),
    )
    for row in found:
        scores = [_spanned(row.rouge.get(name), "{:.2f}") for name in ("rouge1", "rouge2", "rougeL")]
        rouge.add_row(row.arm, row.reference, str(row.batch_size), *scores)
        if row.win_tie is not None:
            counts = map(str, (row.wins, row.ties, row.losses))
            judge.add_row(row.arm, row.reference, str(row.batch_size), *counts, _spanned(row.win_tie, "{:.0%}"))
    screen = console(highlight=False)
    screen.print("\ntexts beside references; in brackets 95 % intervals\n")
    for printed in (rouge, judge) if judge.row_count else (rouge,):
        printed.padding = (0, 1, 0, 0)
        screen.print(printed)
        screen.print()


def _spanned(figure: Any, form: str) -> str:
    if figure is None:
        return NONE
    span = "" if figure.low is None else f" ({form.format(figure.low)}–{form.format(figure.high)})"
    return form.format(figure.value) + span


def show_verdict(evidence: "Evidence", command: str, what: str = "how fast it is") -> None:
    """Two lines at most; `command` says of a head that is better than chance `what` nothing here has measured."""
    if evidence.warning is not None:
        show(f"warning: {evidence.warning}")
    show(f"see {what}: {command}" if evidence.verdict is None else evidence.verdict)


@dataclass(frozen=True)
class Output:
    """One prompt's continuation."""

    prompt: str
    ids: list[int]  # new tokens, without padding
    stats: "SpeculationStats | None"  # of this text; None: there was no draft
    cut: bool  # at --max-new-tokens: it has no end token

    @property
    def sources(self) -> list[int]:
        """Where each token came from, as an index into `stats.row.SOURCES`; empty where there was no draft."""
        return [] if self.stats is None else self.stats.rows[0].token_sources


@dataclass(frozen=True)
class Written:
    """All texts, the seconds that they took, and what is known of all together."""

    outputs: list[Output]
    seconds: float
    stats: "SpeculationStats | None"  # None: there was no draft


def json_report(written: Written, tokenizer: Any, names: dict[str, Any]) -> dict[str, Any]:
    """The whole run; `names`: of the models and the policy."""
    texts = [
        {
            "prompt": o.prompt,
            "text": continuation(tokenizer, _prompt(o, tokenizer), o.ids),
            "token_ids": o.ids,
            "speculation": None if o.stats is None else o.stats.summary(o.stats.rows[0], sources=True),
        }
        for o in written.outputs
    ]
    speculation = None if written.stats is None else written.stats.to_dict()
    return names | {"seconds": round(written.seconds, 4), "speculation": speculation, "outputs": texts}


def write_page(file: Path, outputs: list[Output], tokenizer: Any, name: str) -> None:
    """Write the texts as a page, each token with its source as a colour and as a mark. `name`: of the policy."""
    from ..artifacts.files import write_text
    from ..evaluation.page import Section, group_by_source
    from ..evaluation.page import render_html as html

    special, texts = special_tokens(tokenizer), []
    for output in outputs:
        tokens = pieces(tokenizer, _prompt(output, tokenizer), output.ids, special)
        texts.append(group_by_source(output.prompt.strip(), tokens, output.sources))
    title = f"hf-lossy generate --policy {name}"
    write_text(file, html(title, [Section(f"{len(texts)} texts", [], texts=[("texts", texts)])]))


def show_outputs(outputs: list[Output], tokenizer: Any, problems: list[Any], streamed: bool) -> None:
    """Prompts and continuations; accepted draft tokens in another colour than the target's own."""
    screen = console(highlight=False, soft_wrap=True)
    solved = 0
    for i, output in enumerate(outputs):
        if not streamed:
            screen.print(Text(output.prompt.strip(), style="dim"))
            screen.print(_coloured(output, tokenizer))
            screen.print()
        if problems:
            solved += (
                hla.demo.answer(continuation(tokenizer, _prompt(output, tokenizer), output.ids)) == problems[i].answer
            )
    if problems:
        cut = sum(output.cut for output in outputs)
        note = f" ({cut} cut off before the end: a larger --max-new-tokens writes on)" if cut else ""
        screen.print(f"solved {solved} of {len(problems)} problems{note}")


def show_report(written: Written, policy: str) -> None:
    """Statistics of all texts, and the speed."""
    from ..stats.speculation import SOURCES

    screen = console(highlight=False)
    if written.stats is not None:
        names = (Text(name, style=colour) for name, colour in zip(SOURCES, COLOURS, strict=True))
        if screen.color_system is not None:  # else nothing tells the sources apart
            screen.print(Text("tokens: ").append_text(Text(" ").join(names)))
        screen.print(written.stats.table())
    tokens = sum(len(output.ids) for output in written.outputs)
    speed = tokens / written.seconds
    screen.print(f"policy {policy}: {tokens} tokens in {written.seconds:.2f} s, {speed:.1f} tokens/s")


def _coloured(output: Output, tokenizer: Any) -> Text:
    text = Text()
    kinds: Sequence[int | None] = output.sources or [None] * len(output.ids)
    read = pieces(tokenizer, _prompt(output, tokenizer), output.ids)
    for kind, group in groupby(zip(kinds, read, strict=True), key=lambda pair: pair[0]):
        text.append("".join(piece for _, piece in group), style="" if kind is None else COLOURS[kind])
    return text


def _prompt(output: Output, tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(output.prompt)["input_ids"]
    return ids
