"""The page of `hf-lossy report`: figures and pictures of folders that `compare`, `tune` and `fit` wrote, in one HTML file."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from ..artifacts.head import CONFIG, Head
from ..artifacts.json_io import parse_json, read_lines, read_object
from ..policy.parse import strip_paths
from ..validation import one_line, visible
from .arms import ArmFacts
from .metrics import NONE, ArmMetrics, compute_metrics, format_row
from .results import ANSWERS, RECORD
from .writer import ArmOutput


PNG = b"\x89PNG\r\n\x1a\n"  # a head's folder may be anybody's: only pictures of it are shown
HEAD_PICTURES = ("roc.png", "reliability.png")  # as the `fit` commands write them


@dataclass(frozen=True)
class Table:
    """Figures of one batch size, and the picture of its speeds."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    picture: str


@dataclass(frozen=True)
class Section:
    """One folder on the page. Pictures are data URIs."""

    title: str
    about: str
    notes: list[str]
    tables: list[Table]
    pictures: list[str]


def render_page(folders: Sequence[Path]) -> str:
    """Return the page on `folders` as HTML, with names escaped. Raises: see `read_section`."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.finalize = lambda value: visible(value) if isinstance(value, str) else value
    sections = [read_section(folder) for folder in folders]
    return templates.get_template("page.html.jinja").render(sections=sections)


def read_section(folder: Path) -> Section:
    """Read a folder of `compare` or `tune`, or a head's.

    Raises: `ValueError`, one line, for a folder that is damaged or was written by another version; `FileNotFoundError`.
    """
    if (folder / CONFIG).is_file():
        return _describe_head(folder)
    try:
        return _describe_run(folder, *read_run(folder))
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ZeroDivisionError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 100)}"
        raise ValueError(
            f"{folder} was not written by this version of compare or tune ({reason}): run it again"
        ) from None


def read_run(folder: Path) -> tuple[dict[str, Any], list[ArmOutput]]:
    """Return the record and the answers of a run of `compare` or `tune`. Raises: as `read_section`."""
    for name in (RECORD, ANSWERS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} holds no {name}: expected a folder that hf-lossy compare or tune wrote with --out, or a head's"
            )
    record = read_object(folder / RECORD, "an object, the record of a run")
    with open(folder / ANSWERS, "rb") as file:
        lines = [parse_json(line, where) for where, line in read_lines(file, str(folder / ANSWERS))]
    return record, [ArmOutput.from_dict(line) for line in lines]


def _describe_head(folder: Path) -> Section:
    config = Head.from_pretrained(str(folder)).config
    models = " with ".join(model.id for model in (config.target, config.draft) if model is not None)
    label = f": {config.label}" if config.label else ""
    about = f"a {config.kind} head for {config.method}, P({config.polarity}){label}; {models or 'models not named'}"
    names = ("auroc", "auroc_low", "auroc_high", "brier")
    figures = {name: config.metrics[name] for name in names if isinstance(config.metrics.get(name), int | float)}
    notes = [text for name in ("verdict", "warning") if isinstance(text := config.metrics.get(name), str)]
    files = [(folder / name).read_bytes() for name in HEAD_PICTURES if (folder / name).is_file()]
    pictures = [encode_png(data) for data in files if data.startswith(PNG)]
    measured = "; ".join(f"{name} {value:.3f}" for name, value in figures.items()) or "no AUROC in its config"
    return Section(folder.name, f"{about}; {measured}", notes, [], pictures)


def _describe_run(folder: Path, record: dict[str, Any], answers: Sequence[ArmOutput]) -> Section:
    """Describe a run; a search has tried settings on its first problems and certified them on the others."""
    arms = [ArmFacts(name, arm["kind"], arm["lossless"], arm.get("draft")) for name, arm in record["arms"].items()]
    first, tables = record.get("first", 0), []
    stages = {", certificate": [answer for answer in answers if answer.prompt >= first]} if first else {"": answers}
    if first:
        stages[", trial"] = [answer for answer in answers if answer.prompt < first]
    for stage, outputs in stages.items():
        metrics = compute_metrics(outputs, arms)
        for size in sorted({arm.batch_size for arm in metrics}):
            tables.append(
                _make_table([arm for arm in metrics if arm.batch_size == size], stage, record["target_dtype"])
            )
    models = f"{record['target']['id']} with {', '.join(record['drafts'])}"
    about = [models, record["source"], record["machine"], record["target_dtype"]]
    advice = record.get("found", {}).get("advice", {})
    notes = [advice] if isinstance(advice, str) else [f"batch size {size}: {line}" for size, line in advice.items()]
    return Section(folder.name, "; ".join([*about, "in brackets 95 % intervals"]), notes, tables, [])


def _make_table(arms: Sequence[ArmMetrics], stage: str, dtype: str) -> Table:
    """Return the figures of arms at one batch size, without columns that are empty."""
    cells = [{name: cell for row in format_row(arm, dtype) for name, cell in row.items()} for arm in arms]
    names = [strip_paths(arm.policy) + arm.arm.removeprefix(arm.policy) for arm in arms]
    columns = [column for column in cells[0] if any(row[column] != NONE for row in cells)]
    rows = [[name, *(row[column] for column in columns)] for name, row in zip(names, cells, strict=True)]
    title = f"batch size {arms[0].batch_size}, {arms[0].prompts} prompts{stage}"
    return Table(title, ["", *columns], rows, _draw_speeds(arms, names))


def _draw_speeds(arms: Sequence[ArmMetrics], names: Sequence[str]) -> str:
    """Plot each arm's tokens per second against its share of right answers, or of texts equal to the target's."""
    figure, png = Figure(figsize=(5, 3.4 + 0.22 * len(arms)), layout="constrained"), BytesIO()
    quality = "right answers" if arms[0].accuracy else "texts equal to the target's"
    axes = figure.add_subplot(xlabel="tokens per second", ylabel=quality)
    for index, (arm, name) in enumerate(zip(arms, names, strict=True)):
        colour, marker = f"C{index % 10}", "osD^vP*X"[index % 8]
        share, low, high = arm.accuracy or (arm.equal / arm.prompts, None, None)
        label = name.replace("$", "\\$") + ("" if arm.lossless else " (lossy)")
        if low is not None and high is not None:
            axes.vlines(arm.speed, low, high, color=colour, alpha=0.6)
        axes.plot(arm.speed, share, marker, color=colour, label=label)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False)
    figure.savefig(png, format="png", dpi=150)
    return encode_png(png.getvalue())


def encode_png(data: bytes) -> str:
    """Return a picture as a data URI."""
    return "data:image/png;base64," + base64.b64encode(data).decode()
