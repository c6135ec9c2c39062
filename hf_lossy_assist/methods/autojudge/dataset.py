"""Dataset of mined mismatches: units of an unfinished run, columns, folder and card, and reading it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ...artifacts.cards import data_card
from ...artifacts.files import JSONObject
from ...artifacts.identity import ModelIdentity
from ...text.detokenizer import continuation
from ...training.run_folder import RunFolder, finish_dataset, load_rows, name_units, name_unreadable, open_dataset
from .search import Mined, Mismatch


if TYPE_CHECKING:
    from datasets import Dataset, Features

RECORD = "mine.json"
# The rows of a problem stay on one side of every split. Positions are indices of the final response, in which unimportant tokens are the draft's.
COLUMNS = ("problem", "position", "target_token", "draft_token", "important")


def make_schema() -> "Features":
    """Return the columns of the dataset, which has a row for each mismatch."""
    from datasets import Features, List, Value

    texts = ("prompt", "response", "target_answer", "answer")
    kinds = dict.fromkeys(COLUMNS[:-1], "int32") | {"important": "bool"} | dict.fromkeys(texts, "string")
    ids = dict.fromkeys(("prompt_ids", "response_ids"), List(Value("int32")))
    return Features({name: Value(kind) for name, kind in kinds.items()} | ids)


def assemble(run: RunFolder, tokenizer: PreTrainedTokenizerBase) -> None:
    """Combine the problems of a run into an Arrow dataset, in order."""
    from datasets import Dataset

    mined = []
    for name in name_units(run.facts["problems"], "json"):
        spec = json.loads((run.part / name).read_bytes())
        mined.append(Mined(**spec | {"mismatches": [Mismatch(**mismatch) for mismatch in spec["mismatches"]]}))
    facts = run.facts | {"found": summarise(mined, run.facts["settings"]["max_new_tokens"])}

    def make(cache: Path) -> "Dataset":
        rows, columns = make_rows(mined, tokenizer), make_schema()
        return Dataset.from_dict({name: [row[name] for row in rows] for name in columns}, features=columns)

    # One file even without rows: a dataset without files cannot be read back.
    finish_dataset(run, facts, make, lambda facts, _: make_data_card(facts), num_shards=1)


def make_rows(mined: Sequence[Mined], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    """Return the dataset's rows."""
    rows = []
    for one in mined:
        common = {
            "problem": one.problem,
            "prompt": one.prompt,
            "response": continuation(tokenizer, one.prompt_ids, one.response),
            "prompt_ids": one.prompt_ids,
            "response_ids": one.response,
            "target_answer": one.target_answer,
        }
        rows += [common | asdict(m) for m in one.mismatches]
    return rows


def summarise(mined: Sequence[Mined], max_new_tokens: int) -> dict[str, int]:
    """Count the findings of a run, for mine.json and its card. `max_new_tokens`: the limit at which responses were cut."""
    mismatches = [m for one in mined for m in one.mismatches]
    without = [one for one in mined if one.target_answer is None]
    return {
        "mismatches": len(mismatches),
        "important": sum(m.important for m in mismatches),
        "no_answer": sum(m.answer is None for m in mismatches),  # among them: the alternative had no answer
        "problems_without_answer": len(without),  # by the target: not searched
        "cut_without_answer": sum(len(one.target_response) >= max_new_tokens for one in without),  # among those
        "cut_by_mismatches": sum(one.cut == "mismatches" for one in mined),
        "cut_by_seconds": sum(one.cut == "seconds" for one in mined),
        "continuations": sum(one.continuations for one in mined),
        "target_tokens": sum(one.new_tokens for one in mined),
    }


def make_data_card(facts: JSONObject) -> str:
    """Return the README.md of a mined dataset as text."""
    counts = facts["found"]
    share, target = counts["important"] / max(counts["mismatches"], 1), ModelIdentity.from_dict(facts["target"])
    return data_card("mined.md", "autojudge", facts, found=counts, share=share, target=target)


def explain_unsearched(facts: JSONObject) -> list[str]:
    """Return the reasons why problems were not searched, or not completely, and what to do, one line each."""
    counts, problems, reasons = facts.get("found", {}), facts.get("problems"), list[str]()
    if without := counts.get("problems_without_answer", 0):
        cut = counts.get("cut_without_answer", 0)
        hint = "raise --max-new-tokens" if cut else "ask for its form in the prompts (--chat, --shots)"
        reasons.append(
            f"{without} of {problems} problems were not searched: the target's response has no answer that the task finds, {cut} were "
            f"cut short: {hint}"
        )
    if late := counts.get("cut_by_seconds", 0):
        reasons.append(f"{late} of {problems} problems were cut off at --max-seconds: raise it")
    return reasons


def explain_nothing(facts: JSONObject) -> str:
    """Return one line on why a dataset with this record has no mismatch, and what to do."""
    guessed = f"the draft guessed every token of {facts.get('problems', 'all')} problems as the target does"
    return "; ".join(explain_unsearched(facts)) or f"{guessed}: mine more or harder problems, or take a weaker draft"


@dataclass(frozen=True)
class MinedTable:
    """A mined dataset as tensors: N mismatches, in order."""

    problem: torch.Tensor  # (N,) int64
    position: torch.Tensor  # (N,) int64   index into the problem's response
    target_token: torch.Tensor  # (N,) int64
    draft_token: torch.Tensor  # (N,) int64
    important: torch.Tensor  # (N,) bool
    texts: dict[int, tuple[list[int], list[int]]]  # by problem: the prompt's tokens, the response's tokens
    facts: JSONObject  # mine.json

    def by_problem(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each problem with its row numbers (n,) int64."""
        order = self.problem.argsort(stable=True)
        names, counts = self.problem[order].unique_consecutive(return_counts=True)
        yield from zip(names.tolist(), order.split(counts.tolist()), strict=True)

    def find_tokens(self) -> set[int]:
        """Return all token ids in it."""
        tokens = {*self.target_token.tolist(), *self.draft_token.tolist()}
        return tokens.union(*(ids for text in self.texts.values() for ids in text))

    def __len__(self) -> int:
        return len(self.problem)


def read_mined(path: str | Path) -> MinedTable:
    """Read a dataset written by `hf-lossy mine`.

    Raises: `ValueError`, one line, for a folder that is something else, unfinished, without mismatches or inconsistent.
    """
    path = Path(path)
    facts = open_dataset(path, RECORD, "hf-lossy mine")
    data = load_rows(path)
    if len(data) == 0:
        raise ValueError(f"{path} has no mismatch: {explain_nothing(facts)}")
    with name_unreadable(path):
        columns = data.select_columns(list(COLUMNS)).with_format("numpy")
        column = {name: torch.from_numpy(np.asarray(columns[name][:])).long() for name in COLUMNS}
        problems, firsts = np.unique(column["problem"].numpy(), return_index=True)
        texts = data.select_columns(["prompt_ids", "response_ids"]).select(firsts)
        mined = MinedTable(
            **column | {"important": column["important"].bool()},
            texts={int(n): (row["prompt_ids"], row["response_ids"]) for n, row in zip(problems, texts, strict=True)},
            facts=facts,
        )
        rows = zip(*(getattr(mined, name).tolist() for name in COLUMNS[:-1]), strict=True)
        for problem, t, *tokens in rows:
            prompt, response = mined.texts[problem]
            if not prompt or t < 0 or response[t] not in tokens:
                raise ValueError(f"problem {problem} does not differ at position {t} in the tokens {tokens}")
    return mined
