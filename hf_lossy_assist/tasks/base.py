"""Base classes of tasks: prompts, the answer of a response, the equivalence of two answers; and reading their files.

AutoJudge (Garipov et al. 2025, section 3.1) calls a token unimportant if replacing it leaves an *equivalent answer*.
"""

import gzip
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ..artifacts.hub import fetch_data, is_data
from ..artifacts.json_io import parse_json, read_lines
from ..validation import one_line, shown


@dataclass(frozen=True)
class Problem:
    """One problem. `prompt` is the model's input (before a chat template), `gold` the right answer (None: unknown), `extra` further data for
    judging an answer."""

    prompt: str
    gold: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)


class AnswerTask(ABC):
    """A set of problems with a notion of "the answer". Methods of slow tasks are called from several threads.

    `slow`: `extract` or `same` run a program or query a server, so callers should run them in threads. `against_running`: compare an alternative
    with the current response of the search instead of the target's first one (AutoJudge, appendix L), for relations such as "not worse", which are
    not transitive. `ends`: texts at which a response ends. `closing`: pattern after which a response ends.
    """

    name: str = ""
    slow: bool = False
    against_running: bool = False
    ends: tuple[str, ...] = ()
    closing: re.Pattern[str] | None = None

    @abstractmethod
    def problems(self, limit: int | None = None) -> list[Problem]:
        """Return the first `limit` problems, or all."""

    @abstractmethod
    def extract(self, problem: Problem, response: str) -> str | None:
        """Return the answer in `response`; None if it has none, which is not the same as a wrong one."""

    @abstractmethod
    def same(self, problem: Problem, reference: str, answer: str) -> bool:
        """Return whether two extracted answers are equivalent, so that `answer` may replace `reference`."""

    def right(self, problem: Problem, answer: str | None) -> bool | None:
        """Return whether an extracted answer is right; None if there is no answer, or the right one is unknown."""
        if answer is None or problem.gold is None:
            return None
        return self.same(problem, problem.gold, answer)

    @property
    def ends_early(self) -> bool:
        """Whether a response may have ended although the model continues."""
        return bool(self.ends) or self.closing is not None

    def over(self, text: str) -> bool:
        """Return whether a response that contains `text` has ended."""
        return any(end in text for end in self.ends) or (self.closing is not None and bool(self.closing.search(text)))

    def cut(self, response: str) -> str:
        """Return `response` up to the first of `ends` and after `closing`; a few-shot model would write another question, or repeat its answer."""
        found = [place for end in self.ends if (place := response.find(end)) >= 0]
        closed = None if self.closing is None else self.closing.search(response)
        return response[: min([*found, *([closed.end()] if closed else []), len(response)])]


class FileRow(NamedTuple):
    """A JSON object with its position for error messages."""

    values: dict[str, object]
    where: str

    def text(self, *names: str) -> str:
        """Return the text (or number) under the first of `names` that has one. Raises: `ValueError` with file and line if none has."""
        found = self.optional(*names)
        if found is None:
            expected = f"a text under {names[0]!r}" if len(names) == 1 else f"a text under one of {', '.join(names)}"
            raise ValueError(
                f"{self.where}: expected {expected}, got the fields {one_line(', '.join(self.values)) or '(none)'}"
            )
        return found

    def optional(self, *names: str) -> str | None:
        """Return the first text under one of these names, or None. A list counts by its first entry, as in Spec-Bench's `turns`."""
        for name in names:
            value = self.values.get(name)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int | float) and not isinstance(value, bool):
                value = str(value)
            if isinstance(value, str) and value.strip():
                return value
        return None


Data = str | Path | Iterable[FileRow]  # a JSON-lines file, or rows already read
PLACEHOLDER = (
    "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # SPEED-Bench's, in place of prompts of other data sets
)


def refuse_placeholder(prompt: str, where: str) -> None:
    """Raise `ValueError`, one line, for a row of SPEED-Bench whose prompt has not been filled in."""
    if prompt.startswith(PLACEHOLDER):
        raise ValueError(
            f"{where}: SPEED-Bench's placeholder in place of a prompt: fill the file in with prepare_data.py of NVIDIA's specdec_bench"
        )


def read_rows(path: str | Path) -> Iterator[FileRow]:
    """Yield the JSON objects of a JSON-lines file (`.gz`: compressed), one by one.

    Raises: `FileNotFoundError`; `ValueError` with file and line for a line that is not a JSON object, and for a file without any.
    """
    path, empty = require_file(path), True
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for where, line in read_lines(cast(IO[bytes], file), str(path)):
                row, empty = as_row(parse_json(line, where), where), False
                yield row
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); unpack it or drop the ending .gz") from None
    if empty:
        raise ValueError(f"{path} holds no rows; expected one JSON object per line")


def as_row(values: object, where: str) -> FileRow:
    """Return a JSON value as a row. Raises: `ValueError`, one line, if it is not an object."""
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected a JSON object, got {shown(values)}")
    return FileRow(values, where)


def require_file(path: str | Path) -> Path:
    """Return `path` if it is a file, or the local copy of a dataset's on the Hub. Raises: `FileNotFoundError`, one line, otherwise."""
    path = Path(path)
    if is_data(path):
        return fetch_data(path)[0]
    if path.is_dir():
        raise FileNotFoundError(f"expected a file, got the folder {shown(str(path), 200)}: name a file in it")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {shown(str(path), 200)}")
    return path


class FileTask(AnswerTask):
    """A task whose problems are rows, of a JSON-lines file or from elsewhere; a missing file is refused at once, an invalid row when read."""

    def __init__(self, path: Data):
        self.path = require_file(path) if isinstance(path, str | Path) else path

    def rows(self) -> Iterator[FileRow]:
        """Return all rows, one by one."""
        return read_rows(self.path) if isinstance(self.path, Path) else iter(self.path)

    def problems(self, limit: int | None = None) -> list[Problem]:
        return [self.problem(row) for row in islice(self.rows(), limit)]

    @abstractmethod
    def problem(self, row: FileRow) -> Problem:
        """Return the problem in one row. Raises: `ValueError` with file and line if a field is missing."""


class ExactTask(FileTask):
    """Problems whose answer is a line of text: JSON lines with `prompt` (or `question`) and, if known, `answer`.

    The answer of a response is its last non-blank line; answers are compared up to white space.
    """

    name = "exact"

    def problem(self, row: FileRow) -> Problem:
        return Problem(row.text("prompt", "question", "turns"), row.optional("answer"), row.values)

    def extract(self, problem: Problem, response: str) -> str | None:
        lines = [line.strip() for line in self.cut(response).splitlines() if line.strip()]
        return lines[-1] if lines else None

    def same(self, problem: Problem, reference: str, answer: str) -> bool:
        return squeeze_blanks(reference) == squeeze_blanks(answer)


def squeeze_blanks(text: str) -> str:
    """Return `text` with every run of white space replaced by one space."""
    return " ".join(text.split())


def find_first(texts: Sequence[str | None]) -> str | None:
    """Return the first text that is not None."""
    return next((text for text in texts if text is not None), None)
