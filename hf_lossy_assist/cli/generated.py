"""What `hf-lossy generate` prints: texts with each token's source as its colour, statistics, or all of it as JSON."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

import hf_lossy_assist as hla

from ..terminal import console


if TYPE_CHECKING:
    from ..stats.report import SpeculationStats
    from ..stats.row import RowStats

COLOURS = ("green", "magenta", "bold yellow", "cyan")  # of stats.report.SOURCES


@dataclass(frozen=True)
class Output:
    """One prompt's continuation."""

    prompt: str
    ids: list[int]  # new tokens, without padding
    row: "RowStats | None"  # None: there was no draft
    stats: "SpeculationStats | None"  # of the batch that it was written in
    cut: bool  # at --max-new-tokens: it has no end token


def json_report(outputs: list[Output], tokenizer: Any, names: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The whole run; `names`: of the models and the policy."""
    merged = _merged(outputs)
    texts = [
        {
            "prompt": o.prompt,
            "text": tokenizer.decode(o.ids, skip_special_tokens=True),
            "token_ids": o.ids,
            "speculation": o.stats.summary(o.row, sources=True) if o.row is not None and o.stats is not None else None,
        }
        for o in outputs
    ]
    speculation = None if merged is None else merged.to_dict()
    return names | {"seconds": round(seconds, 4), "speculation": speculation, "outputs": texts}


def write_page(
    file: Path, outputs: list[Output], tokenizer: Any, name: str, models: tuple[Any, Any], policy: Any
) -> None:
    """The texts as HTML, each token with its source as a colour and as a mark, p, q and what heads say of it.

    name: of the policy, as it was asked for. models: the target, and the draft if one drafted. policy: None for the target alone.
    """
    from ..artifacts.files import write_text
    from ..evaluation.page import page, paragraph
    from ..evaluation.scoring import score
    from ..evaluation.text_view import legend, text_view

    target, draft = models if policy is not None else (models[0], None)
    heads = {} if policy is None else policy.heads()
    body = [legend()]
    for output in outputs:
        sources = [] if output.row is None else output.row.token_sources
        scores = score(target, draft, heads, tokenizer(output.prompt)["input_ids"], output.ids, sources)
        body.append(paragraph(output.prompt.strip(), "prompt"))
        body.append(text_view([tokenizer.decode([token]) for token in output.ids], sources, scores))
    write_text(file, page(f"hf-lossy generate --policy {name}", body))


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
            solved += hla.demo.answer(tokenizer.decode(output.ids)) == problems[i].answer
    if problems:
        cut = sum(output.cut for output in outputs)
        note = f" ({cut} cut off before the end: a larger --max-new-tokens writes on)" if cut else ""
        screen.print(f"solved {solved} of {len(problems)} problems{note}")


def show_report(outputs: list[Output], seconds: float, policy: str) -> None:
    """Statistics of all batches, and the speed."""
    from ..stats.row import SOURCES

    screen, merged = console(highlight=False), _merged(outputs)
    if merged is not None:
        names = (Text(name, style=colour) for name, colour in zip(SOURCES, COLOURS, strict=True))
        if screen.color_system is not None:  # else nothing tells the sources apart
            screen.print(Text("tokens: ").append_text(Text(" ").join(names)))
        screen.print(merged.table())
    tokens = sum(len(output.ids) for output in outputs)
    screen.print(f"policy {policy}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s")


def _merged(outputs: list[Output]) -> "SpeculationStats | None":
    calls = {id(o.stats): o.stats for o in outputs if o.stats is not None}
    return hla.SpeculationStats.merge(list(calls.values())) if calls else None


def _coloured(output: Output, tokenizer: Any) -> Text:
    text = Text()
    kinds = output.row.token_sources if output.row else [None] * len(output.ids)
    # Neighbours of one kind are decoded together: a word may be spread over several tokens.
    for kind, group in groupby(zip(kinds, output.ids, strict=True), key=lambda pair: pair[0]):
        piece = tokenizer.decode([token for _, token in group], skip_special_tokens=True)
        text.append(piece, style="" if kind is None else COLOURS[kind])
    return text
