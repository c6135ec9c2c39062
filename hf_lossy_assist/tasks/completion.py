"""Texts to be completed, as SPRINTER's experiments have them: LM1B (Chelba et al. 2013) and WikiText (Merity et al. 2016)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..artifacts.json_io import read_lines
from ..validation import check_int, check_positive, shown
from .answers import Data, Problem, Row
from .judging import Judge, QATask


SHARE = 0.3  # of each text's words is the prompt (Zhong et al. 2025, section 4)
FEWEST = 10  # words of a text that is used
JSON_ENDINGS = (".json", ".jsonl", ".gz")


class CompletionTask(QATask):
    """Texts of which the first words are the prompt and the others the reference, which the problem's `extra` holds.

    A file holds one text a line, or JSON lines with `text`. Texts with fewer than `fewest` words and WikiText's headings
    (= Title =) are passed over. There is no right answer: what a policy costs is told by ROUGE against the reference
    (`rouge.rouge`) and by wins and ties that a judge model gives (`QATask.versus`).

    Args:
        share: of the words, that are the prompt.
    """

    def __init__(
        self, path: Data, judge: Judge | None = None, *, share: float = SHARE, fewest: int = FEWEST, **settings: Any
    ):
        super().__init__(path, judge, **settings)
        check_positive("share", share, 0.9)
        check_int("fewest", fewest, 2, 10**6)
        self.share, self.fewest = share, fewest

    def rows(self) -> Iterator[Row]:
        rows = _text_lines(self.path) if self._is_text() else super().rows()
        return (row for row in rows if self._serves(row))

    def problem(self, row: Row) -> Problem:
        words = row.text("text").split()
        first = max(1, round(self.share * len(words)))
        return Problem(" ".join(words[:first]), None, {"reference": " ".join(words[first:])})

    def _is_text(self) -> bool:
        return isinstance(self.path, Path) and self.path.suffix not in JSON_ENDINGS

    def _serves(self, row: Row) -> bool:
        text = row.values.get("text")
        if not isinstance(text, str):
            raise ValueError(f"{row.where}: expected a text under 'text', got {shown(text)}")
        heading = text.startswith((" = ", "= ")) and text.rstrip().endswith(" =")
        return not heading and len(text.split()) >= self.fewest


class LM1B(CompletionTask):
    """Sentences of the One Billion Word Benchmark."""

    name = "lm1b"


class WikiText(CompletionTask):
    """Paragraphs of WikiText."""

    name = "wikitext"


def _text_lines(path: Any) -> Iterator[Row]:
    """The lines of a text file that are not blank, each as the row that a JSON file would have."""
    with path.open("rb") as file:
        for where, line in read_lines(file, str(path)):
            try:
                yield Row({"text": line.decode("utf-8")}, where)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} is not UTF-8 ({error.reason}): save the file in UTF-8") from None
