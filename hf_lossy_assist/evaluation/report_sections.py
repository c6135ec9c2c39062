"""Turn folders into sections of a report: what `compare` and `tune` wrote, and how good a fitted head is on held-out tokens."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts.head import CONFIG, Head
from ..artifacts.head_config import HeadConfig
from ..artifacts.json_io import read_lines, read_object
from ..policy.parse import strip_paths
from ..stats.intervals import Estimate
from ..terminal import digits
from ..training.head_quality import CURVES, Curves
from ..training.resumable import compute_key, open_sealed_line
from ..validation import check_number, one_line
from .arm_metrics import ArmMetrics, compute_metrics
from .measuring import ArmOutput
from .page import NONE, Section, SourcedText, Table, group_by_source
from .results import ANSWERS, RECORD


NO_CURVES = f"no ROC and no reliability: this head's config has no {CURVES}; heads that this version's fit sprinter or fit autojudge writes have them"
AS_IF = "Wilson's intervals, as if the tokens of one text were independent"


@dataclass(frozen=True)
class FoundHead:
    """Figures in a head's folder; `auroc` and `curves` are None where it does not."""

    name: str
    config: HeadConfig
    auroc: Estimate | None
    curves: Curves | None

    @property
    def labels(self) -> tuple[str, str]:
        """Names of tokens of a high probability, and of the others."""
        return self.config.polarity, f"un{self.config.polarity}"

    def about(self) -> str:
        """Describe the head: its method, its state, its label, its models."""
        config = self.config
        pair = (
            " with ".join(model.id for model in (config.target, config.draft) if model is not None)
            or "models not named"
        )
        label = f": {config.label}" if config.label else ""
        return f"a {config.kind} head for {config.method} on the {config.features}; it says P({config.polarity}){label}; {pair}"

    def separates(self) -> str:
        """Return the AUROC with its interval, and of how many tokens."""
        if self.auroc is None:
            return "no AUROC in its config"
        value, low, high = self.auroc
        between = "no interval" if low is None or high is None else f"95 %: {low:.3f}–{high:.3f}"
        return f"AUROC {value:.3f} ({between}{'' if self.curves is None else '; ' + self.tokens()})"

    def tokens(self) -> str:
        """Return how many held-out tokens there are of each label."""
        assert self.curves is not None
        counts = zip((self.curves.positives, self.curves.negatives), self.labels, strict=True)
        return " and ".join(f"{count} {label}" for count, label in counts) + " held-out tokens"

    def remarks(self) -> list[str]:
        """Return the remarks of fitting on the figures."""
        lines = (self.config.metrics.get(name) for name in ("verdict", "warning"))
        return [line for line in lines if isinstance(line, str)]


def is_head(folder: Path) -> bool:
    """Return whether a folder looks like a head's."""
    return (folder / CONFIG).is_file()


def read_head(folder: Path) -> FoundHead:
    """Read a head's folder, anybody's. Raises: `ValueError`, one line."""
    config = Head.from_pretrained(str(folder)).config
    try:
        given = config.metrics.get(CURVES)
        curves = None if given is None else Curves.from_dict(given)
        return FoundHead(folder.name, config, _read_auroc(config.metrics), curves)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: metrics: {error}: fit the head again, or get its files again") from None


def make_head_section(found: FoundHead) -> Section:
    """Make its part of the report."""
    from ..training.charts import draw_reliability, draw_roc, encode_as_uri

    notes = list(found.remarks())
    if found.curves is None:
        return Section(found.name, [found.about(), found.separates(), NO_CURVES], notes)
    label, other = found.labels
    false, true = zip(*found.curves.roc, strict=True)
    auroc = float("nan") if found.auroc is None else found.auroc.value
    roc = draw_roc(
        {"the head": (false, true, auroc)}, "ROC", f"share of {other} tokens above a threshold",
        f"share of {label} tokens above it",
    )  # fmt: skip
    bins = found.curves.reliability
    reliability = draw_reliability(
        [(bin.mean, bin.share.value, bin.tokens) for bin in bins], f"share that is {label}", "Reliability",
        [(bin.share.low or 0.0, bin.share.high or 1.0) for bin in bins],
    )  # fmt: skip
    charts = [(encode_as_uri(roc), f"ROC: {found.separates()}"), (encode_as_uri(reliability), f"Reliability; {AS_IF}")]
    heads, rows = format_reliability(found.curves, label)
    return Section(
        found.name, [found.about(), found.separates()], notes, [Table(f"Reliability; {AS_IF}", heads, rows, charts)]
    )


def format_reliability(curves: Curves, label: str) -> tuple[list[str], list[list[str]]]:
    """Return the table of reliability."""
    rows = []
    for bin in curves.reliability:
        share = bin.share
        rows.append([f"{bin.mean:.3f}", str(bin.tokens), f"{share.value:.3f}", f"{share.low:.3f}–{share.high:.3f}"])
    return [f"mean P({label})", "tokens", label, "95 %"], rows


def _read_auroc(metrics: Any) -> Estimate | None:
    """Return the AUROC with its interval, as far as they are there."""
    value, low, high = (metrics.get(name) for name in ("auroc", "auroc_low", "auroc_high"))
    if value is None:
        return None
    check_number("auroc", value, 0.0, 1.0)
    if low is None or high is None:
        return Estimate(value, None, None)
    check_number("auroc_low", low, 0.0, value)
    check_number("auroc_high", high, value, 1.0)
    return Estimate(value, low, high)


FIRST = 4  # prompts whose texts are shown
POSITIONS = "share of rounds that keep at least so many tokens, the target's own included"


@dataclass(frozen=True)
class FoundRun:
    """A folder that a comparison wrote."""

    name: str
    record: dict[str, Any]
    parts: list["RunPart"]

    @property
    def answers(self) -> list[ArmOutput]:
        return [answer for part in self.parts for answer in part.answers]

    @property
    def rounds(self) -> bool:
        """True if the models' precision is below float32."""
        return bool(self.record["dtype"] != "float32")


@dataclass(frozen=True)
class RunPart:
    """The answers to some of the problems: all of `compare`; of `tune` those of the trial, and those of the certificate."""

    title: str
    answers: list[ArmOutput]
    figures: list[ArmMetrics]


@dataclass(frozen=True)
class _Arm:
    """Record of an arm, as far as the metrics need it."""

    name: str
    kind: str
    lossless: bool


def read_folder(folder: Path) -> FoundRun | FoundHead:
    """Read a folder of `compare` or `tune`, or a head's. Raises: as `read_run`."""
    return read_head(folder) if is_head(folder) else read_run(folder)


def read_run(folder: Path) -> FoundRun:
    """Read a folder of `compare` or `tune`. Raises: `ValueError`, one line, for what is damaged or none; `FileNotFoundError`."""
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
        arms = [_Arm(name, arm["kind"], arm["lossless"]) for name, arm in record["arms"].items()]
        found = FoundRun(folder.name, record, _make_parts(answers, arms, record.get("first", 0)))
        _describe(found), _recommend(found)  # what they ask for is there
    return found


def _make_parts(answers: Sequence[ArmOutput], arms: Sequence[_Arm], first: int) -> list[RunPart]:
    """Split the answers at `first`, the number of problems of the trial; candidates are certified on the others."""
    behind = [answer for answer in answers if answer.prompt >= first]
    found = [RunPart(", certificate" if first else "", behind, compute_metrics(behind, arms))]
    if first:
        tried = [answer for answer in answers if answer.prompt < first]
        found.append(RunPart(", trial", tried, compute_metrics(tried, arms)))
    return found


@contextmanager
def _refuse_other_versions(folder: Path) -> Iterator[None]:
    """Refuse, in one line, a record and answers with other entries than this version writes."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{folder} was not written by this version of compare or tune ({type(error).__name__}: {one_line(error, 100)}): run it again"
        ) from None


def make_sections(found: Sequence[FoundRun | FoundHead]) -> list[Section]:
    """Make a part of the report for each folder."""
    return [make_head_section(folder) if isinstance(folder, FoundHead) else _make_section(folder) for folder in found]


def format_title(found: Sequence[FoundRun | FoundHead]) -> str:
    """Return the report's title."""
    if all(isinstance(folder, FoundHead) for folder in found):
        return "What the heads are worth"
    return "Which policy, how fast, at what cost"


def _make_section(run: FoundRun) -> Section:
    from ..training.charts import draw_speed_and_quality, encode_as_uri

    tables = []
    for part, size, here in _group_metrics(run):
        about = f"batch size {size}, {here[0].prompts} prompts{part.title}"
        chart = encode_as_uri(draw_speed_and_quality(*_make_points(here)))
        tables.append(
            Table(about, *format_metrics(here, run.rounds), [(chart, f"{about}: speed and {_make_points(here)[1]}")])
        )
        if positions := count_positions(part.answers, size):
            tables.append(Table(f"{about}: {POSITIONS}", *positions))
    return Section(run.name, [_describe(run)], _recommend(run), tables, _collect_texts(run))


def _group_metrics(run: FoundRun) -> Iterator[tuple[RunPart, int, list[ArmMetrics]]]:
    """Yield each part and batch size with its figures."""
    for part in run.parts:
        for size in sorted({line.batch_size for line in part.figures}):
            yield part, size, [line for line in part.figures if line.batch_size == size]


def format_metrics(here: Sequence[ArmMetrics], rounds: bool) -> tuple[list[str], list[list[str]]]:
    """Make the table of one batch size. `rounds`: the models' precision is below float32."""
    heads = ["", "tokens/s", "× target", "× assisted", "tokens a call", "accepted", "guarantee", "lossy", "unchecked", "same text", "right"]  # fmt: skip
    rows = []
    for run in here:
        rows.append([
            strip_paths(run.arm), _format_estimate(run.tokens_per_second, f".{digits(run.tokens_per_second.value)}f"), _format_estimate(run.of_target, ".2f"),
            NONE if run.of_assisted is None else f"{run.of_assisted.value:.2f}", _format_optional(run.tokens_per_target_call, ".2f"),
            _format_optional(run.acceptance, ".0%"), run.guarantee(rounds), _format_optional(run.lossy, ".1%"), _format_optional(run.unchecked, ".1%"), f"{run.equal}/{run.prompts}",
            NONE if run.accuracy is None else f"{run.right}/{run.judged}, {_format_estimate(run.accuracy, '.0%')}",
        ])  # fmt: skip
    return heads, rows


def count_positions(answers: Sequence[ArmOutput], size: int) -> tuple[list[str], list[list[str]]] | None:
    """Count, for each policy, the share of rounds that keep at least 1, 2, … tokens. None if no arm has rounds."""
    rounds: defaultdict[str, list[int]] = defaultdict(list)
    for answer in answers:
        if answer.batch_size == size and answer.accept_lengths:
            rounds[answer.arm] += answer.accept_lengths
    if not rounds:
        return None
    longest = min(max(max(lengths) for lengths in rounds.values()), 12)
    heads = ["", "rounds", *map(str, range(1, longest + 1))]
    rows = [
        [
            strip_paths(arm),
            str(len(lengths)),
            *(f"{sum(n >= place for n in lengths) / len(lengths):.0%}" for place in range(1, longest + 1)),
        ]
        for arm, lengths in rounds.items()
    ]
    return heads, rows


def _make_points(here: Sequence[ArmMetrics]) -> tuple[list[tuple[str, float, float, tuple[float, float] | None]], str]:
    """Make what `draw_speed_and_quality` takes."""
    found = []
    for arm in here:
        share, low, high = arm.accuracy or (arm.equal / arm.prompts, None, None)
        name = strip_paths(arm.arm) + ("" if arm.lossless else " (lossy)")
        interval = None if low is None or high is None else (low, high)
        found.append((name, arm.tokens_per_second.value, share, interval))
    return found, "right answers" if here[0].accuracy else "texts equal to the target's"


def _collect_texts(run: FoundRun) -> list[tuple[str, list[SourcedText]]]:
    """Return the first prompts' texts by policies, at the smallest batch size."""
    found = [answer for answer in run.answers if answer.sources and answer.prompt < FIRST]
    smallest = min((answer.batch_size for answer in found), default=None)
    by: defaultdict[int, list[SourcedText]] = defaultdict(list)
    for answer in found:
        if answer.batch_size == smallest:
            verdict = "" if answer.right is None else ", right" if answer.right else ", wrong"
            title = f"prompt {answer.prompt + 1}, {strip_paths(answer.arm)}{verdict}"
            by[answer.prompt].append(group_by_source(title, answer.pieces, answer.sources))
    return [(f"prompt {prompt + 1}", by[prompt]) for prompt in sorted(by)]


def _describe(run: FoundRun) -> str:
    record = run.record
    pair = " with ".join(record[role]["id"] for role in ("target", "draft"))
    return f"{pair}; {record['source']}; {record['machine']}; {record['dtype']}; in brackets 95 % intervals"


def _recommend(run: FoundRun) -> list[str]:
    given = run.record.get("found", {}).get("advice", {})
    return [given] if isinstance(given, str) else [f"batch size {size}: {line}" for size, line in given.items()]


def _format_estimate(figure: Any, form: str) -> str:
    if figure.low is None:
        return format(figure.value, form)
    return f"{figure.value:{form}} ({figure.low:{form}}–{figure.high:{form}})"


def _format_optional(value: float | None, form: str) -> str:
    return format(value, form) if value else NONE
