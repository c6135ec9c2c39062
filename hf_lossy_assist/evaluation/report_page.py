"""Reports on folders written by `compare`, `tune` and `fit`: a self-contained HTML page, or Markdown."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from ..artifacts.cards import escape
from ..artifacts.head import CONFIG, Head
from ..artifacts.head_config import HeadConfig
from ..artifacts.json_io import read_lines, read_object
from ..policy.parse import strip_paths
from ..stats.intervals import Estimate
from ..stats.speculation import SOURCES
from ..training.head_quality import CURVES, Curves
from ..training.resumable import compute_key, open_sealed_line
from ..validation import check_number, one_line, visible
from .metrics import NONE, ArmMetrics, compute_metrics, format_row
from .results import ANSWERS, RECORD
from .writer import ArmOutput


FIRST = 4  # prompts whose texts are shown
NO_CURVES = f"no ROC and no reliability: this head's config has no {CURVES}; heads that this version's fit sprinter or fit autojudge writes have them"
AS_IF = "Wilson's intervals, as if the tokens of one text were independent"


@dataclass(frozen=True)
class Table:
    """A table, without columns that have no figure, and its charts (address of the image, caption)."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    charts: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shown = [i for i in range(len(self.heads)) if i == 0 or any(row[i] != NONE for row in self.rows)]
        object.__setattr__(self, "heads", [self.heads[i] for i in shown])
        object.__setattr__(self, "rows", [[row[i] for i in shown] for row in self.rows])


@dataclass(frozen=True)
class SourcedText:
    """A text, as runs of tokens with the same source: (name of the source, text)."""

    title: str
    runs: list[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """One folder's part of a report. `texts`: by title; the first is expanded."""

    title: str
    about: list[str]
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    texts: list[tuple[str, list[SourcedText]]] = field(default_factory=list)


def group_by_source(title: str, pieces: Sequence[str], sources: Sequence[int]) -> SourcedText:
    """Return a `SourcedText` of tokens. `sources`: for each an index into `SOURCES`; empty: the target alone wrote them."""
    names = [SOURCES[source] for source in sources] or ["target alone"] * len(pieces)
    pairs = groupby(zip(names, pieces, strict=True), key=lambda pair: pair[0])
    return SourcedText(title, [(name, "".join(piece for _, piece in run)) for name, run in pairs])


def render_html(title: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML, with names and texts escaped."""
    import jinja2

    here = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(loader=here, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.finalize = lambda value: visible(value) if isinstance(value, str) else value
    return made.get_template("page.html.jinja").render(title=title, sections=sections, sources=SOURCES)


def render_markdown(title: str, sections: Sequence[Section]) -> str:
    """Return the report as Markdown, without charts and texts."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {escape(section.title)}", *(escape(line) for line in section.about)]
        parts += [f"**{escape(line)}**" for line in section.notes]
        for table in section.tables:
            lines = [table.heads, ["---"] * len(table.heads), *escape(table.rows)]
            parts += [f"{table.title}:", "\n".join("| " + " | ".join(row) + " |" for row in lines)]
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class FoundHead:
    """Figures in a head's folder; `auroc` and `curves` are None if it has none."""

    name: str
    config: HeadConfig
    auroc: Estimate | None
    curves: Curves | None

    @property
    def labels(self) -> tuple[str, str]:
        """Names of tokens with a high probability, and of the others."""
        return self.config.polarity, f"un{self.config.polarity}"

    def about(self) -> str:
        """Return a description of the head: its method, state, label and models."""
        config = self.config
        pair = (
            " with ".join(model.id for model in (config.target, config.draft) if model is not None)
            or "models not named"
        )
        label = f": {config.label}" if config.label else ""
        return f"a {config.kind} head for {config.method} on the {config.features}; it says P({config.polarity}){label}; {pair}"

    def separates(self) -> str:
        """Return the AUROC with its interval and the number of tokens."""
        if self.auroc is None:
            return "no AUROC in its config"
        value, low, high = self.auroc
        between = "no interval" if low is None or high is None else f"95 %: {low:.3f}–{high:.3f}"
        return f"AUROC {value:.3f} ({between}{'' if self.curves is None else '; ' + self.tokens()})"

    def tokens(self) -> str:
        """Return the number of held-out tokens with each label."""
        assert self.curves is not None
        counts = zip((self.curves.positives, self.curves.negatives), self.labels, strict=True)
        return " and ".join(f"{count} {label}" for count, label in counts) + " held-out tokens"

    def remarks(self) -> list[str]:
        """Return the remarks that fitting made on the figures."""
        lines = (self.config.metrics.get(name) for name in ("verdict", "warning"))
        return [line for line in lines if isinstance(line, str)]


def read_head(folder: Path) -> FoundHead:
    """Read a head's folder, which may be from an untrusted source. Raises: `ValueError`, one line."""
    config = Head.from_pretrained(str(folder)).config
    try:
        given = config.metrics.get(CURVES)
        curves = None if given is None else Curves.from_dict(given)
        return FoundHead(folder.name, config, _read_auroc(config.metrics), curves)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: metrics: {error}: fit the head again, or get its files again") from None


def make_head_section(found: FoundHead) -> Section:
    """Return a head's part of the report."""
    from ..training.charts import draw_reliability, draw_roc, encode_as_uri

    notes = list(found.remarks())
    if found.curves is None:
        return Section(found.name, [found.about(), found.separates(), NO_CURVES], notes)
    label, other = found.labels
    false, true = zip(*found.curves.roc, strict=True)
    auroc = float("nan") if found.auroc is None else found.auroc.value
    roc = draw_roc(
        {"the head": (false, true, auroc)},
        "ROC",
        f"share of {other} tokens above a threshold",
        f"share of {label} tokens above it",
    )
    bins = found.curves.reliability
    reliability = draw_reliability(
        [(bin.mean, bin.share.value, bin.tokens) for bin in bins],
        f"share that is {label}",
        "Reliability",
        [(bin.share.low or 0.0, bin.share.high or 1.0) for bin in bins],
    )
    charts = [(encode_as_uri(roc), f"ROC: {found.separates()}"), (encode_as_uri(reliability), f"Reliability; {AS_IF}")]
    heads, rows = format_reliability(found.curves, label)
    return Section(
        found.name, [found.about(), found.separates()], notes, [Table(f"Reliability; {AS_IF}", heads, rows, charts)]
    )


def format_reliability(curves: Curves, label: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the table of reliability."""
    rows = []
    for bin in curves.reliability:
        share = bin.share
        rows.append([f"{bin.mean:.3f}", str(bin.tokens), f"{share.value:.3f}", f"{share.low:.3f}–{share.high:.3f}"])
    return [f"mean P({label})", "tokens", label, "95 %"], rows


def _read_auroc(metrics: Mapping[str, float | None]) -> Estimate | None:
    """Return the AUROC with its interval, as far as available."""
    value, low, high = (metrics.get(name) for name in ("auroc", "auroc_low", "auroc_high"))
    if value is None:
        return None
    check_number("auroc", value, 0.0, 1.0)
    if low is None or high is None:
        return Estimate(value, None, None)
    check_number("auroc_low", low, 0.0, value)
    check_number("auroc_high", high, value, 1.0)
    return Estimate(value, low, high)


@dataclass(frozen=True)
class FoundRun:
    """A folder written by a comparison."""

    name: str
    record: dict[str, Any]
    parts: list["RunPart"]

    @property
    def answers(self) -> list[ArmOutput]:
        return [answer for part in self.parts for answer in part.answers]


@dataclass(frozen=True)
class RunPart:
    """Answers to some of the problems: for `compare` to all, for `tune` to those of the trial and to those of the certificate."""

    title: str
    answers: list[ArmOutput]
    metrics: list[ArmMetrics]


@dataclass(frozen=True)
class RecordedArm:
    """Record of an arm, as far as the metrics need it."""

    name: str
    kind: str
    lossless: bool
    draft: str | None = None


def read_folder(folder: Path) -> FoundRun | FoundHead:
    """Read a folder of `compare` or `tune`, or a head's. Raises: see `read_run`."""
    return read_head(folder) if (folder / CONFIG).is_file() else read_run(folder)


def read_run(folder: Path) -> FoundRun:
    """Read a folder of `compare` or `tune`. Raises: `ValueError`, one line, for a damaged or other folder; `FileNotFoundError`."""
    for name in (RECORD, ANSWERS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} holds no {name}: expected a folder that hf-lossy compare or tune wrote with --out, or a head's"
            )
    record = read_object(folder / RECORD, "an object, the record of a run")
    key, answers = compute_key(folder / RECORD), []
    with _refuse_other_versions(folder):
        with open(folder / ANSWERS, "rb") as file:
            for where, line in read_lines(file, str(folder / ANSWERS)):
                answers.append(ArmOutput.from_dict(open_sealed_line(line, where, key)))
        arms = [
            RecordedArm(name, arm["kind"], arm["lossless"], arm.get("draft")) for name, arm in record["arms"].items()
        ]
        found = FoundRun(folder.name, record, _make_parts(answers, arms, record.get("first", 0)))
        _describe(found), _recommend(found)  # raise if an entry that they need is missing
    return found


def _make_parts(answers: Sequence[ArmOutput], arms: Sequence[RecordedArm], first: int) -> list[RunPart]:
    """Split the answers at `first`, the number of problems in the trial; candidates are certified on the others."""
    behind = [answer for answer in answers if answer.prompt >= first]
    found = [RunPart(", certificate" if first else "", behind, compute_metrics(behind, arms))]
    if first:
        tried = [answer for answer in answers if answer.prompt < first]
        found.append(RunPart(", trial", tried, compute_metrics(tried, arms)))
    return found


@contextmanager
def _refuse_other_versions(folder: Path) -> Iterator[None]:
    """Refuse, in one line, a record and answers whose entries are not those of this version."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{folder} was not written by this version of compare or tune ({type(error).__name__}: {one_line(error, 100)}): run it again"
        ) from None


def make_sections(found: Sequence[FoundRun | FoundHead]) -> list[Section]:
    """Return a part of the report for each folder."""
    return [make_head_section(folder) if isinstance(folder, FoundHead) else _make_section(folder) for folder in found]


def format_title(found: Sequence[FoundRun | FoundHead]) -> str:
    """Return the report's title."""
    if all(isinstance(folder, FoundHead) for folder in found):
        return "What the heads are worth"
    return "Which policy, how fast, at what cost"


def _make_section(run: FoundRun) -> Section:
    from ..training.charts import draw_speed_and_quality, encode_as_uri

    tables = []
    for part in run.parts:
        for size in sorted({line.batch_size for line in part.metrics}):
            here = [line for line in part.metrics if line.batch_size == size]
            about = f"batch size {size}, {here[0].prompts} prompts{part.title}"
            points, quality = _make_points(here)
            chart = encode_as_uri(draw_speed_and_quality(points, quality))
            rows = [
                {k: v for cells in format_row(line, run.record["dtype"]) for k, v in cells.items()} for line in here
            ]
            cells = [[_show_name(line), *row.values()] for line, row in zip(here, rows, strict=True)]
            tables.append(Table(about, ["", *rows[0]], cells, [(chart, f"{about}: speed and {quality}")]))
    return Section(run.name, [_describe(run)], _recommend(run), tables, _collect_texts(run))


def _make_points(here: Sequence[ArmMetrics]) -> tuple[list[tuple[str, float, float, tuple[float, float] | None]], str]:
    """Return the arguments of `draw_speed_and_quality`."""
    found = []
    for arm in here:
        share, low, high = arm.accuracy or (arm.equal / arm.prompts, None, None)
        name = _show_name(arm) + ("" if arm.lossless else " (lossy)")
        interval = None if low is None or high is None else (low, high)
        found.append((name, arm.tokens_per_second.value, share, interval))
    return found, "right answers" if here[0].accuracy else "texts equal to the target's"


def _collect_texts(run: FoundRun) -> list[tuple[str, list[SourcedText]]]:
    """Return the policies' texts for the first prompts, at the smallest batch size."""
    found = [answer for answer in run.answers if answer.sources and answer.prompt < FIRST]
    smallest = min((answer.batch_size for answer in found), default=None)
    by: defaultdict[int, list[SourcedText]] = defaultdict(list)
    names = {line.arm: _show_name(line) for part in run.parts for line in part.metrics}
    for answer in found:
        if answer.batch_size == smallest:
            verdict = "" if answer.right is None else ", right" if answer.right else ", wrong"
            title = f"prompt {answer.prompt + 1}, {names[answer.arm]}{verdict}"
            by[answer.prompt].append(group_by_source(title, answer.pieces, answer.sources))
    return [(f"prompt {prompt + 1}", by[prompt]) for prompt in sorted(by)]


def _describe(run: FoundRun) -> str:
    record = run.record
    drafts = ", ".join(record["drafts"]) if "drafts" in record else record["draft"]["id"]
    return f"{record['target']['id']} with {drafts}; {record['source']}; {record['machine']}; {record['dtype']}; in brackets 95 % intervals"


def _show_name(line: ArmMetrics) -> str:
    return strip_paths(line.policy) + line.arm.removeprefix(line.policy)


def _recommend(run: FoundRun) -> list[str]:
    given = run.record.get("found", {}).get("advice", {})
    return [given] if isinstance(given, str) else [f"batch size {size}: {line}" for size, line in given.items()]
