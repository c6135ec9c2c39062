"""Base classes of tasks: prompts, the answer of a response, the equivalence of two answers.

AutoJudge (Garipov et al. 2025, section 3.1) calls a token unimportant if replacing it leaves an *equivalent answer*.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from .prompts import FIELDS, Row, read_rows, require_file


@dataclass(frozen=True)
class Problem:
    """One problem: the model's input (before a chat template), the right answer (None: unknown), and further data for judging an answer."""

    prompt: str
    gold: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)


class AnswerTask(ABC):
    """A set of problems with a notion of "the answer". Methods of slow tasks are called from several threads.

    `slow`: `extract` or `same` run a program, so callers should run them in threads. `ends`: texts at which a response ends. `closing`: pattern
    after which a response ends.
    """

    name: str = ""
    slow: bool = False
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
        """Return `response` up to the first of `ends` and after `closing`; a few-shot model would go on to another question."""
        ends = [response.index(end) for end in self.ends if end in response]
        closed = None if self.closing is None else self.closing.search(response)
        return response[: min([*ends, *([closed.end()] if closed else []), len(response)])]


Data = str | Path | Iterable[Row]  # a file, see `read_rows`, or rows already read


class FileTask(AnswerTask):
    """A task whose problems are rows; a missing file is refused at once, an invalid row when read."""

    def __init__(self, path: Data):
        self.path = require_file(path) if isinstance(path, str | Path) else path

    def problems(self, limit: int | None = None) -> list[Problem]:
        rows = read_rows(self.path) if isinstance(self.path, Path) else self.path
        return [self.problem(row) for row in islice(rows, limit)]

    @abstractmethod
    def problem(self, row: Row) -> Problem:
        """Return the problem in one row. Raises: `ValueError` with file and line if a field is missing."""


class ExactTask(FileTask):
    """Problems whose answer is a response's last line, up to white space: JSON lines with `prompt` (or `question`) and, if known, `answer`."""

    name = "exact"

    def problem(self, row: Row) -> Problem:
        return Problem(row.text(*FIELDS), row.optional("answer"), row.values)

    def extract(self, problem: Problem, response: str) -> str | None:
        lines = [line.strip() for line in self.cut(response).splitlines() if line.strip()]
        return lines[-1] if lines else None

    def same(self, problem: Problem, reference: str, answer: str) -> bool:
        return squeeze_blanks(reference) == squeeze_blanks(answer)


def squeeze_blanks(text: str) -> str:
    """Return `text` with every run of white space replaced by one space."""
    return " ".join(text.split())
