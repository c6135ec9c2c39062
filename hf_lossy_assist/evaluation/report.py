"""What `compare` and `tune` wrote, and what heads are worth, as sections of a report."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts.json_io import read_lines, read_object
from ..policy.short_form import strip_paths
from ..terminal import digits
from ..training.resumable import compute_key, open_sealed_line
from ..validation import one_line
from .figures import Figures, figures
from .heads import FoundHead, is_head, read_head, section_of
from .measuring import Answer
from .page import NONE, Section, Table, Text, text_of
from .store import ANSWERS, RECORD


FIRST = 4  # prompts whose texts are shown
POSITIONS = "share of rounds that keep at least so many tokens, the target's own included"


@dataclass(frozen=True)
class Found:
    """A folder that a comparison wrote."""

    name: str
    record: dict[str, Any]
    parts: list["Part"]

    @property
    def answers(self) -> list[Answer]:
        return [answer for part in self.parts for answer in part.answers]

    @property
    def rounds(self) -> bool:
        """Whether the models' precision is below float32."""
        return bool(self.record["dtype"] != "float32")


@dataclass(frozen=True)
class Part:
    """The answers to some of the problems: all of `compare`; of `tune` those of the trial, and those of the certificate."""

    title: str
    answers: list[Answer]
    figures: list[Figures]


@dataclass(frozen=True)
class _Arm:
    """As much of an arm as the figures ask for, from the record."""

    name: str
    kind: str
    lossless: bool


def read(folder: Path) -> Found | FoundHead:
    """Read a folder of `compare` or `tune`, or a head's. Raises: as `read_run`."""
    return read_head(folder) if is_head(folder) else read_run(folder)


def read_run(folder: Path) -> Found:
    """Read a folder of `compare` or `tune`. Raises: `ValueError`, one line, for what is damaged or none; `FileNotFoundError`."""
    for name in (RECORD, ANSWERS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} holds no {name}: expected a folder that hf-lossy compare or tune wrote with --out, or a head's"
            )
    record = read_object(folder / RECORD, "an object, the record of a run")
    key, answers = compute_key(folder / RECORD), []
    with _of_this_version(folder):
        with open(folder / ANSWERS, "rb") as file:
            for where, line in read_lines(file, str(folder / ANSWERS)):
                answers.append(Answer.from_dict(open_sealed_line(line, where, key)))
        arms = [_Arm(name, its["kind"], its["lossless"]) for name, its in record["arms"].items()]
        found = Found(folder.name, record, _parts(answers, arms, record.get("first", 0)))
        _about(found), _advice(found)  # what they ask for is there
    return found


def _parts(answers: Sequence[Answer], arms: Sequence[_Arm], first: int) -> list[Part]:
    """`first`: how many problems settings were tried on; what was chosen by them is judged on the others."""
    behind = [its for its in answers if its.prompt >= first]
    found = [Part(", certificate" if first else "", behind, figures(behind, arms))]
    if first:
        tried = [its for its in answers if its.prompt < first]
        found.append(Part(", trial", tried, figures(tried, arms)))
    return found


@contextmanager
def _of_this_version(folder: Path) -> Iterator[None]:
    """For what reads a record and answers: other entries than this version writes are one line."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{folder} was not written by this version of compare or tune ({type(error).__name__}: {one_line(error, 100)}): run it again"
        ) from None


def sections(found: Sequence[Found | FoundHead]) -> list[Section]:
    """Make a part of the report for each folder."""
    return [section_of(its) if isinstance(its, FoundHead) else _section(its) for its in found]


def title_of(found: Sequence[Found | FoundHead]) -> str:
    """Return the report's title."""
    if all(isinstance(its, FoundHead) for its in found):
        return "What the heads are worth"
    return "Which policy, how fast, at what cost"


def _section(its: Found) -> Section:
    from ..training.charts import draw_speed_and_quality, encode_as_uri

    tables = []
    for part, size, here in _tables(its):
        about = f"batch size {size}, {here[0].prompts} prompts{part.title}"
        chart = encode_as_uri(draw_speed_and_quality(*_points(here)))
        tables.append(Table(about, *cells(here, its.rounds), [(chart, f"{about}: speed and {_points(here)[1]}")]))
        if positions := by_position(part.answers, size):
            tables.append(Table(f"{about}: {POSITIONS}", *positions))
    return Section(its.name, [_about(its)], _advice(its), tables, _texts(its))


def _tables(its: Found) -> Iterator[tuple[Part, int, list[Figures]]]:
    """Each part and batch size with its figures."""
    for part in its.parts:
        for size in sorted({line.batch_size for line in part.figures}):
            yield part, size, [line for line in part.figures if line.batch_size == size]


def cells(here: Sequence[Figures], rounds: bool) -> tuple[list[str], list[list[str]]]:
    """Make the table of one batch size. `rounds`: the models' precision is below float32."""
    heads = ["", "tokens/s", "× target", "× assisted", "tokens a call", "accepted", "guarantee", "lossy", "unchecked", "same text", "right"]  # fmt: skip
    rows = []
    for its in here:
        rows.append([
            strip_paths(its.arm), _with(its.tokens_per_second, f".{digits(its.tokens_per_second.value)}f"), _with(its.of_target, ".2f"),
            NONE if its.of_assisted is None else f"{its.of_assisted.value:.2f}", _or(its.tokens_per_target_call, ".2f"),
            _or(its.acceptance, ".0%"), its.guarantee(rounds), _or(its.lossy, ".1%"), _or(its.unchecked, ".1%"), f"{its.equal}/{its.prompts}",
            NONE if its.accuracy is None else f"{its.right}/{its.judged}, {_with(its.accuracy, '.0%')}",
        ])  # fmt: skip
    return heads, rows


def by_position(answers: Sequence[Answer], size: int) -> tuple[list[str], list[list[str]]] | None:
    """Of each policy: the share of its rounds that keep at least 1, 2, … tokens. None where no arm has rounds."""
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
            str(len(kept)),
            *(f"{sum(n >= place for n in kept) / len(kept):.0%}" for place in range(1, longest + 1)),
        ]
        for arm, kept in rounds.items()
    ]
    return heads, rows


def _points(here: Sequence[Figures]) -> tuple[list[tuple[str, float, float, tuple[float, float] | None]], str]:
    """Make what `draw_speed_and_quality` takes."""
    found = []
    for its in here:
        share, low, high = its.accuracy or (its.equal / its.prompts, None, None)
        name = strip_paths(its.arm) + ("" if its.lossless else " (lossy)")
        interval = None if low is None or high is None else (low, high)
        found.append((name, its.tokens_per_second.value, share, interval))
    return found, "right answers" if here[0].accuracy else "texts equal to the target's"


def _texts(its: Found) -> list[tuple[str, list[Text]]]:
    """The first prompts' texts by policies, at the smallest batch size."""
    found = [answer for answer in its.answers if answer.sources and answer.prompt < FIRST]
    smallest = min((answer.batch_size for answer in found), default=None)
    by: defaultdict[int, list[Text]] = defaultdict(list)
    for answer in found:
        if answer.batch_size == smallest:
            verdict = "" if answer.right is None else ", right" if answer.right else ", wrong"
            title = f"prompt {answer.prompt + 1}, {strip_paths(answer.arm)}{verdict}"
            by[answer.prompt].append(text_of(title, answer.pieces, answer.sources))
    return [(f"prompt {prompt + 1}", by[prompt]) for prompt in sorted(by)]


def _about(its: Found) -> str:
    record = its.record
    pair = " with ".join(record[role]["id"] for role in ("target", "draft"))
    return f"{pair}; {record['source']}; {record['machine']}; {record['dtype']}; in brackets 95 % intervals"


def _advice(its: Found) -> list[str]:
    given = its.record.get("found", {}).get("advice", {})
    return [given] if isinstance(given, str) else [f"batch size {size}: {line}" for size, line in given.items()]


def _with(figure: Any, form: str) -> str:
    if figure.low is None:
        return format(figure.value, form)
    return f"{figure.value:{form}} ({figure.low:{form}}–{figure.high:{form}})"


def _or(value: float | None, form: str) -> str:
    return format(value, form) if value else NONE
