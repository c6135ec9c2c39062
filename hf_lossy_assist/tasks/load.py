"""Load tasks by name, for mining and evaluation: from a file, else from the Hub with the library `datasets`."""

from pathlib import Path

from ..validation import nearest, one_line, shown
from .base import AnswerTask, ExactTask, Problem
from .code import CodeTask
from .demo_task import DemoTask
from .math import GSM8K, MathTask
from .prompts import Row


__all__ = ["GSM8K", "AnswerTask", "CodeTask", "DemoTask", "ExactTask", "MathTask", "Problem", "load_task"]

# Repository and config on the Hub, the split to measure on, and the one to learn from.
SOURCES = {
    GSM8K.name: ("openai/gsm8k", "main", "test", "train"),
    MathTask.name: ("HuggingFaceH4/MATH-500", None, "test", "test"),
}
NAMES = (DemoTask.name, CodeTask.name, *SOURCES)


def load_rows(task: str, learn: bool = False) -> list[Row]:
    """Load the rows of a task in `SOURCES` from the Hub; `learn`: the training split, since the result is measured on other rows."""
    repo, config, test, train = SOURCES[task]
    split = train if learn else test
    try:
        from datasets import load_dataset

        rows = load_dataset(repo, config, split=split)
    except Exception as error:  # errors of the Hub, the network, a reader or a disk, of any type
        reason = f"{type(error).__name__}: {one_line(error, 120)}"
        raise ValueError(f"the task {task} needs --data: {repo} ({split}) was not loaded ({reason})") from None
    return [Row(dict(values), f"{repo} ({split}), row {index}") for index, values in enumerate(rows, 1)]


def load_task(
    name_or_path: str,
    *,
    data: str | Path | None = None,
    split: str = "test",
    seed: int = 0,
    shots: int = 0,
    chat: bool = True,
    allow_code_execution: bool = False,
    sandbox: bool = True,
) -> AnswerTask:
    """Return the task with a name in `NAMES`, or an `ExactTask` for a file of rows.

    Args:
        data: the file with the problems. Without one they come from the Hub (`SOURCES`).
        split: for demo and the Hub's data ("calibration": to learn from). seed: for demo. shots: worked examples in gsm8k's prompts.
        chat: ask for code in a chat instead of completing it.
        allow_code_execution, sandbox: see `CodeTask`, which runs programs written by a model.
    """
    name = str(name_or_path)
    if shots and name != GSM8K.name:
        raise ValueError(f"shots are for the task gsm8k, not {name}")
    if (allow_code_execution or not sandbox) and name != CodeTask.name:
        raise ValueError(
            f"--allow-code-execution and --no-sandbox are for the task code; {name} runs no programs: leave them out"
        )
    if name == CodeTask.name:
        return CodeTask(data, chat=chat, allow_code_execution=allow_code_execution, sandbox=sandbox)
    if name in SOURCES:
        rows = load_rows(name, learn=split == "calibration") if data is None else data
        return GSM8K(rows, shots) if name == GSM8K.name else MathTask(rows)
    if data is not None:
        raise ValueError(f"the task {shown(name, 200)} has its problems: drop --data {data}")
    if name == DemoTask.name:
        return DemoTask(split, seed)
    if "/" not in name and "." not in name and not Path(name).is_file():
        raise ValueError(f"{nearest('task', name, NAMES)} (or name a JSON-lines file with `prompt` and `answer`)")
    return ExactTask(name)
