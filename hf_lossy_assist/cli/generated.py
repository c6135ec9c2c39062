"""What `hf-lossy generate` prints: texts with each token's source as its colour, statistics, or all of it as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

import hf_lossy_assist as hla

from ..models.texts import continuation, pieces, special_tokens
from ..terminal import console


if TYPE_CHECKING:
    from ..stats.speculation import SpeculationStats

COLOURS = ("green", "magenta", "bold yellow", "cyan")  # of stats.report.SOURCES


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
    from ..evaluation.page import Section
    from ..evaluation.page import group_by_source as text_of
    from ..evaluation.page import render_html as html

    special, texts = special_tokens(tokenizer), []
    for output in outputs:
        tokens = pieces(tokenizer, _prompt(output, tokenizer), output.ids, special)
        texts.append(text_of(output.prompt.strip(), tokens, output.sources))
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
