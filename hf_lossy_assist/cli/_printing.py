"""Print the tables of `compare`, the texts of `generate` and the figures of `fit`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

import hf_lossy_assist as hla

from .. import evaluation
from ..terminal import console, show, table
from ..text.detokenizer import continuation, pieces


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..evaluation.metrics import ArmMetrics
    from ..stats.speculation import SpeculationStats
    from ..training.head_quality import Evidence

COLOURS = ("green", "magenta", "bold yellow", "cyan")  # of stats.speculation.SOURCES


def show_metrics(found: "Sequence[ArmMetrics]", advice: dict[str, str], left_out: dict[str, str], dtype: str) -> None:
    """Print the tables and the advice for each batch size. `dtype`: the precision of the target."""
    screen = console(highlight=False)
    for size, line in advice.items():
        here = [metrics for metrics in found if str(metrics.batch_size) == size]
        screen.print(f"\nbatch size {size}, {here[0].prompts} prompts; in brackets 95 % intervals\n")
        for rows in zip(*(evaluation.metrics.format_row(metrics, dtype) for metrics in here), strict=True):
            heads = [head for head in rows[0] if any(row[head] != evaluation.metrics.NONE for row in rows)]
            if not heads:
                continue
            printed = table("", *heads)
            for metrics, row in zip(here, rows, strict=True):
                printed.add_row(metrics.arm, *(row[head].replace(" up to", "\nup to") for head in heads))
            screen.print(printed)
            screen.print()
        show(line)
    for name, why in left_out.items():
        show(f"{name} was not measured: {why}")


def show_evidence(evidence: "Evidence", command: str, what: str = "how fast it is") -> None:
    """Print at most two lines on a fitted head. command: measures `what`, which was not measured here."""
    if evidence.warning is not None:
        show(f"warning: {evidence.warning}")
    show(f"see {what}: {command}" if evidence.verdict is None else evidence.verdict)


@dataclass(frozen=True)
class GeneratedText:
    """One prompt's continuation."""

    prompt: str
    ids: list[int]  # new tokens, without padding
    stats: "SpeculationStats | None"  # of this text; None: there was no draft
    cut: bool  # at --max-new-tokens, without an end token

    @property
    def sources(self) -> list[int]:
        """Return the source of each token, as an index into `stats.speculation.SOURCES`; empty without a draft."""
        return [] if self.stats is None else self.stats.rows[0].token_sources


@dataclass(frozen=True)
class GeneratedTexts:
    """All texts, the seconds they took, and joint statistics."""

    outputs: list[GeneratedText]
    seconds: float
    stats: "SpeculationStats | None"  # None: there was no draft


def json_report(
    written: GeneratedTexts, tokenizer: "PreTrainedTokenizerBase", names: dict[str, object]
) -> dict[str, object]:
    """Return the report of the whole run. names: of the models and the policy."""
    texts = [
        {
            "prompt": o.prompt,
            "text": continuation(tokenizer, _tokenize_prompt(o, tokenizer), o.ids),
            "token_ids": o.ids,
            "speculation": None if o.stats is None else o.stats.summary(o.stats.rows[0], sources=True),
        }
        for o in written.outputs
    ]
    speculation = None if written.stats is None else written.stats.to_dict()
    return names | {"seconds": round(written.seconds, 4), "speculation": speculation, "outputs": texts}


def show_outputs(
    outputs: list[GeneratedText],
    tokenizer: "PreTrainedTokenizerBase",
    problems: "list[hla.demo.Problem]",
    streamed: bool,
) -> None:
    """Print prompts and continuations, with accepted draft tokens in another colour than the target's."""
    screen = console(highlight=False, soft_wrap=True)
    solved = 0
    for i, output in enumerate(outputs):
        if not streamed:
            screen.print(Text(output.prompt.strip(), style="dim"))
            screen.print(_colour(output, tokenizer))
            screen.print()
        if problems:
            text = continuation(tokenizer, _tokenize_prompt(output, tokenizer), output.ids)
            solved += hla.demo.answer(text) == problems[i].answer
    if problems:
        cut = sum(output.cut for output in outputs)
        note = f" ({cut} cut off before the end: a larger --max-new-tokens writes on)" if cut else ""
        screen.print(f"solved {solved} of {len(problems)} problems{note}")


def show_report(written: GeneratedTexts, policy: str) -> None:
    """Print statistics of all texts, and the speed."""
    from ..stats.speculation import SOURCES

    screen = console(highlight=False)
    if written.stats is not None:
        names = (Text(name, style=colour) for name, colour in zip(SOURCES, COLOURS, strict=True))
        if screen.color_system is not None:  # otherwise sources cannot be told apart
            screen.print(Text("tokens: ").append_text(Text(" ").join(names)))
        screen.print(written.stats.table())
    tokens = sum(len(output.ids) for output in written.outputs)
    speed = tokens / written.seconds
    screen.print(f"policy {policy}: {tokens} tokens in {written.seconds:.2f} s, {speed:.1f} tokens/s")


def _colour(output: GeneratedText, tokenizer: "PreTrainedTokenizerBase") -> Text:
    text = Text()
    kinds: Sequence[int | None] = output.sources or [None] * len(output.ids)
    read = pieces(tokenizer, _tokenize_prompt(output, tokenizer), output.ids)
    for kind, group in groupby(zip(kinds, read, strict=True), key=lambda pair: pair[0]):
        text.append("".join(piece for _, piece in group), style="" if kind is None else COLOURS[kind])
    return text


def _tokenize_prompt(output: GeneratedText, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    ids: list[int] = tokenizer(output.prompt)["input_ids"]
    return ids
