"""Tasks whose answer is a number or a formula: GSM8K (Cobbe et al. 2021) and MATH (Hendrycks et al. 2021)."""

import re
import threading
from fractions import Fraction
from importlib import import_module
from pathlib import Path

from ..validation import check_int, require
from .base import Data, FileTask, Problem, squeeze_blanks
from .prompts import Row, read_rows


SHOTS = [row.values for row in read_rows(Path(__file__).with_name("shots.jsonl"))]  # worked examples
LONGEST = 300  # characters; a longer answer is compared as text
SECONDS = 2  # for math-verify to parse each formula, and to compare them

_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(rf"-?\s*{_DIGITS}(?:(?:\s*/\s*|\s\*\s|\*\*?|\^){_DIGITS})*")
_EXACT = re.compile(r"(-?(?:\d+(?:\.\d+)?|\.\d+))(?:\s*/\s*(\d+(?:\.\d+)?|\.\d+))?")
_TOWER = re.compile(r"[\d.]+(?:\s*(?:\*\*|\^)\s*[\d.]+)+")
_STATED = re.compile(r"the\s+final\s+answer\s+is", re.IGNORECASE)
_PHRASE = re.compile(r"[ \t\n:*$]*([^\n]*?)(\n|\.(?=\s)|\.?\Z)")  # the text after it, and its end
# A whole sentence with a number, up to its end or to the beginning of its repetition.
_CLOSED = re.compile(
    rf"{_STATED.pattern}[\s:*$]{{0,20}}(?:[^\d\n.]|\.(?!\s)){{0,100}}\d[^\n]{{0,100}}?(?:[.!](?=\s)|(?=\n)|(?=\s{_STATED.pattern}))",
    re.IGNORECASE,
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_MIXED = re.compile(r"(?<![\d.,/^*])(\d{1,9})\s+(\d{1,9})\s*/\s*(\d{1,9})(?![\d.,])")  # 2 1/2
_BRACES = re.compile(r"(?P<box>\\f?boxed\s*\{)|\\.|[{}]", re.DOTALL)


def boxed(text: str) -> str | None:
    r"""Return the content of the last closed \boxed{…} in `text`, or None. Linear in the length of the text."""
    opened: list[tuple[bool, int]] = []  # whether it is a box, and where its content begins
    boxes: list[tuple[int, int]] = []
    for mark in _BRACES.finditer(text):
        if mark["box"] or mark[0] == "{":
            opened.append((bool(mark["box"]), mark.end()))
        elif mark[0] == "}" and opened:
            box, start = opened.pop()
            boxes += [(start, mark.start())] if box else []
    return text[slice(*max(boxes))].strip() or None if boxes else None


def stated(text: str) -> str | None:
    """Return the rest of the sentence or line after the last "the final answer is" in `text`; None if nothing follows it.

    A repetition that is cut off in the middle does not count.
    """
    later: str | None = None  # a last one without an end
    for end in reversed([match.end() for match in _STATED.finditer(text)]):
        match = _PHRASE.match(text, end)
        phrase = match[1].strip(" *$") if match else ""
        if match is None or not phrase:
            continue
        if later is not None:
            return phrase if phrase.startswith(later) else later
        if match[2]:
            return phrase
        later = phrase
    return later


def number(text: str) -> str | None:
    """Return the first number in `text` (after its last =, if there is one), without $, commas, units and percent signs; products, quotients and
    powers of numbers count as one. "1,500/1000 km" gives "1500/1000". None if there is no number."""
    text = text.replace("−", "-").rpartition("=")[2]
    text = re.sub(r"\\?\$|\\[,!;]", "", text.replace("{,}", ","))
    text = _FRACTION.sub(r" \1/\2", text.replace("\\cdot", "*").replace("\\times", "*"))
    text = _MIXED.sub(lambda match: f"{int(match[1]) * int(match[3]) + int(match[2])}/{match[3]}", text)
    match = _NUMBER.search(text)
    return re.sub(r"[\s,]", "", match[0]) if match else None


def exact(text: str) -> Fraction | None:
    """Return the value of "-1.5", "3/2" or "1,500"; None for anything else."""
    match = _EXACT.fullmatch(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.strip())) if len(text) <= 100 else None
    if match is None:
        return None
    below = Fraction(match[2] or 1)
    return Fraction(match[1]) / below if below else None


def equal(reference: str, answer: str) -> bool:
    """Return whether two formulas have the same value: 1.5, 3/2 and 1,500/1000 do.

    Equal texts and plain numbers are compared here, other formulas by math-verify in `SECONDS`; a timeout counts as different. Beyond `LONGEST`
    characters only equal texts are the same. Raises: `RuntimeError` outside the main thread.
    """
    texts = [squeeze_blanks(text) for text in (reference, answer)]
    if texts[0] == texts[1]:
        return True
    values = [exact(text) for text in texts]
    if values[0] is not None and values[1] is not None:
        if values[0] == values[1]:
            return True
        if values[0].denominator == values[1].denominator == 1:
            return False  # else math-verify decides whether 0.333333 is close enough to 1/3
    if max(map(len, texts)) > LONGEST:
        return False
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("formulas are compared in the main thread alone: the time limit of math-verify is a signal")
    library = import_module("math_verify")
    sides = [library.parse(f"${_write_latex(text)}$", parsing_timeout=SECONDS) for text in (reference, answer)]
    return bool(all(sides) and library.verify(*sides, timeout_seconds=SECONDS))


def _write_latex(text: str) -> str:
    """Return a plain expression as math-verify parses it completely: it takes 1,500/1000 for a pair, and stops at 9 in 9**9."""
    if not re.fullmatch(r"[-+*/^()\d.,\s]+", text):
        return text.strip().strip("$")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) if exact(text) is not None or "(" not in text else text
    return re.sub(_TOWER, lambda tower: _nest_powers(re.split(r"\*\*|\^", tower[0])), text).replace("*", "\\cdot ")


def _nest_powers(powers: list[str]) -> str:
    """Return a, b, c as a^{b^{c}}."""
    return powers[0].strip() + "".join(f"^{{{power.strip()}" for power in powers[1:]) + "}" * (len(powers) - 1)


class Formulas(FileTask):
    """Base class of `GSM8K` and `MathTask`: equivalence by value."""

    def __init__(self, path: Data):
        require(f"the task {self.name}", "math_verify")
        super().__init__(path)

    def same(self, problem: Problem, reference: str, answer: str) -> bool:
        # The library takes "x = 5" for 5 on its second side only; a reference may have either form.
        return equal(reference, answer) or equal(answer, reference)

    def right(self, problem: Problem, answer: str | None) -> bool | None:
        if answer is None or problem.gold is None:
            return None
        return equal(problem.gold, answer)


class GSM8K(Formulas):
    """Word problems whose answer is a number: JSON lines with `question` and `answer` (the number after "####").

    `shots`: how many of the eight worked examples precede each question. The answer of a response is the number after its last "the final answer
    is", else in \\boxed{…}, else after "####".
    """

    name = "gsm8k"

    def __init__(self, path: Data, shots: int = 0):
        super().__init__(path)
        check_int("shots", shots, 0, len(SHOTS))
        self.shots = SHOTS[:shots]
        self.ends = ("\nQuestion:",) if shots else ()
        self.closing = _CLOSED if shots else None  # the form in which each example ends

    def prompt(self, question: str) -> str:
        """Return the model's input: a request, or examples and an open "Answer:"."""
        if not self.shots:
            return (
                f"{question}\n\nWork this out step by step. Close with one sentence of the form "
                '"The final answer is N", where N is the number asked for.'
            )
        example = "Question: {question}\nAnswer: {reasoning} The final answer is {answer}.\n\n"
        return "".join(example.format(**shot) for shot in self.shots) + f"Question: {question}\nAnswer:"

    def problem(self, row: Row) -> Problem:
        gold = number(row.text("answer").rpartition("####")[2])
        if gold is None:
            raise ValueError(f"{row.where}: expected an `answer` with a number, got {row.text('answer')[-60:]!r}")
        return Problem(self.prompt(row.text("question").strip()), gold, row.values)

    def extract(self, problem: Problem, response: str) -> str | None:
        text = self.cut(response)
        marked = text.rpartition("####")[2].strip().partition("\n")[0] if "####" in text else None
        numbers = (number(match) for match in (stated(text), boxed(text), marked) if match is not None)
        return next((value for value in numbers if value is not None), None)


class MathTask(Formulas):
    r"""Problems whose answer is a formula: JSON lines with `problem` and `answer`, or `solution` with a \boxed{…}.

    The answer of a response is its last \boxed{…}, else the text after "the final answer is".
    """

    name = "math"

    def problem(self, row: Row) -> Problem:
        prompt = f"{row.text('problem').strip()}\n\nReason step by step, and give the final answer as \\boxed{{…}}."
        gold = row.optional("answer") or boxed(row.optional("solution") or "")
        if gold is None:
            raise ValueError(f"{row.where}: expected `answer`, or `solution` with a \\boxed{{…}}, got neither")
        return Problem(prompt, gold.strip(), row.values)

    def extract(self, problem: Problem, response: str) -> str | None:
        text = self.cut(response)
        return boxed(text) or stated(text)
