"""The dataset of mined mismatches: its lines while it is made, its columns, its folder and card."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData

from ...artifacts.cards import TEMPLATES, escape
from ...artifacts.files import new_folder, write_text
from ...models.identity import ModelIdentity
from ...models.texts import continuation
from ...training.finished import seal_dataset
from ...training.resumable import WHOLE, clear, compute_key, open_sealed_line, seal_line
from ...validation import listed
from .search import Mined, Mismatch


RECORD = "mine.json"
LONGEST = 256 * 2**20  # bytes of a problem's line; a response of 8000 tokens with 8000 mismatches fits in


def schema() -> Any:
    """The columns of the dataset: a row for each mismatch."""
    from datasets import Features, List, Value

    return Features(
        {
            "problem": Value("int32"),  # number of the problem: its rows stay on one side of every split
            "prompt": Value("string"),
            "response": Value(
                "string"
            ),  # the final one: unimportant tokens from the draft, important ones from the target
            "prompt_ids": List(Value("int32")),
            "response_ids": List(Value("int32")),
            "position": Value("int32"),  # in response_ids
            "target_token": Value("int32"),
            "draft_token": Value("int32"),
            "important": Value("bool"),
            "target_answer": Value("string"),  # of the target's own response
            "answer": Value("string"),  # of the response with the draft's token, which the target continued
        }
    )


def line_of(mined: Mined, key: str) -> str:
    """A problem as the line of an unfinished run. `ValueError`, one line, where it is longer than what is read back."""
    line = seal_line(asdict(mined), key)
    if len(line) > LONGEST or len(line.encode("utf-8")) > LONGEST:
        raise ValueError(
            f"problem {mined.problem} has {len(mined.mismatches)} mismatches, more than fit into a line of {LONGEST} bytes: mine "
            "again with fewer (max_mismatches) or shorter responses (max_new_tokens)"
        )
    return line


def read_lines(part: Path) -> list[Mined]:
    """The problems that an unfinished run has done, by their number. A last line that was cut off is taken away.

    Raises: `ValueError`, one line, for a line that is not what was written, or of another run.
    """
    found, key = {}, compute_key(part / RECORD)
    for file in sorted(part.glob("*.jsonl")):
        for number, line in enumerate(_whole_lines(file), 1):
            spec = open_sealed_line(line, f"{file}, line {number}", key)
            spec["mismatches"] = [Mismatch(**m) for m in spec["mismatches"]]
            found[spec["problem"]] = Mined(**spec)
    return [found[n] for n in sorted(found)]


def _whole_lines(file: Path) -> Iterator[bytes]:
    """The lines of a file, one by one; what stands behind the last line end is taken away."""
    if not file.is_file():
        raise ValueError(f"{file} is no file: delete it and resume")
    with open(file, "r+b") as lines:
        whole = 0
        while line := lines.readline(LONGEST + 1):  # to "\n" alone: a text may hold other separators
            if len(line) > LONGEST:  # nothing here wrote it, and what stands behind it is not to be lost
                raise ValueError(f"{file} has a line of more than {LONGEST} bytes: delete it and resume")
            if not line.endswith(b"\n"):  # killed, or the disk was full, in the middle of a line
                lines.truncate(whole)
                return
            whole += len(line)
            yield line[:-1]


def assemble(out: Path, part: Path, facts: dict[str, Any], tokenizer: Any) -> None:
    """Put the problems' lines together as an Arrow dataset, in their order, and take them away."""
    from datasets import Dataset

    mined = read_lines(part)
    there = {one.problem for one in mined}
    missing = [number for number in range(facts["problems"]) if number not in there]
    if missing:
        raise ValueError(
            f"{part} lacks {len(missing)} of {facts['problems']} problems ({listed(missing, 5)}): resume mines them again"
        )
    facts = facts | {"found": summary(mined, facts["settings"]["max_new_tokens"])}
    with new_folder(part / WHOLE) as folder:
        found, columns = rows(mined, tokenizer), schema()
        data = Dataset.from_dict({name: [row[name] for row in found] for name in columns}, features=columns)
        data.save_to_disk(str(folder), num_shards=1)  # one even for no rows: none at all could not be read back
        facts = facts | {"files": seal_dataset(folder)}
        write_text(folder / RECORD, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        write_text(folder / "README.md", card(facts))
    os.rename(part / WHOLE, out)
    clear(part, RECORD)


def rows(mined: Sequence[Mined], tokenizer: Any) -> list[dict[str, Any]]:
    """The dataset's rows."""
    out = []
    for one in mined:
        common = {
            "problem": one.problem,
            "prompt": one.prompt,
            "response": continuation(tokenizer, one.prompt_ids, one.response),
            "prompt_ids": one.prompt_ids,
            "response_ids": one.response,
            "target_answer": one.target_answer,
        }
        out += [common | asdict(m) for m in one.mismatches]
    return out


def summary(mined: Sequence[Mined], max_new_tokens: int) -> dict[str, Any]:
    """Counts of a mining run, for mine.json and its card. `max_new_tokens`: where responses were cut."""
    mismatches = [m for one in mined for m in one.mismatches]
    without = [one for one in mined if one.target_answer is None]
    return {
        "mismatches": len(mismatches),
        "important": sum(m.important for m in mismatches),
        "no_answer": sum(m.answer is None for m in mismatches),  # of these: the alternative had no answer
        "problems_without_answer": len(without),  # of the target: not searched
        "cut_without_answer": sum(len(one.target_response) >= max_new_tokens for one in without),  # of these
        "cut_by_mismatches": sum(one.cut == "mismatches" for one in mined),
        "cut_by_seconds": sum(one.cut == "seconds" for one in mined),
        "continuations": sum(one.continuations for one in mined),
        "target_tokens": sum(one.new_tokens for one in mined),
        "retokenised": sum(one.retokenised for one in mined),
    }


def card(facts: dict[str, Any]) -> str:
    """The README.md of a mined dataset, as text."""
    facts = escape(facts)
    found = facts["found"]
    return str(
        DatasetCard.from_template(
            DatasetCardData(license="apache-2.0", tags=["hf_lossy_assist", "autojudge"], task_categories=["text-classification"]),
            template_path=str(TEMPLATES / "mined.md"), facts=facts, found=found,
            share=found["important"] / max(found["mismatches"], 1),
            target=ModelIdentity.from_dict(facts["target"]) if facts["target"] else f"{facts['served']} at {facts['served_at']}",
            draft=ModelIdentity.from_dict(facts["draft"]),
            settings=", ".join(f"{k} {v}" for k, v in facts["settings"].items() if v is not None),
            versions=", ".join(f"{k} {v}" for k, v in facts["versions"].items()),
        )
    )  # fmt: skip


def unanswered(facts: dict[str, Any]) -> str | None:
    """Why problems were not searched, and the way out, in one line; None where all were."""
    found = facts.get("found")
    without, cut = (
        (found.get(name) for name in ("problems_without_answer", "cut_without_answer"))
        if isinstance(found, dict)
        else (0, 0)
    )
    if type(without) is not int or not without:
        return None
    says = f"{without} of {facts.get('problems')} problems were not searched: the target's response has no answer"
    if type(cut) is not int:  # older than 0.2
        return f"{says}: raise --max-new-tokens, if they were cut"
    if not cut:
        return f"{says} that the task finds, and none was cut: ask for its form in the prompts (--chat, --shots)"
    return f"{says}, and {cut} were cut short: raise --max-new-tokens"


def unsearched(facts: dict[str, Any]) -> list[str]:
    """Why problems were not searched, or not to their end, and the way out: a line for each reason that there is."""
    found, reasons = facts.get("found"), [unanswered(facts)]
    late = found.get("cut_by_seconds") if isinstance(found, dict) else 0
    if type(late) is int and late:
        reasons.append(f"{late} of {facts.get('problems')} problems were cut off at --max-seconds: raise it")
    return [reason for reason in reasons if reason is not None]


def why_nothing(facts: dict[str, Any]) -> str:
    """Why a dataset of these facts has no mismatch, and the way out, in one line."""
    reasons, found = unsearched(facts), facts.get("found")
    if not reasons or not isinstance(found, dict):
        return (
            f"the draft guessed every token of {facts.get('problems', 'all')} problems as the target does: mine more or harder problems, "
            "or take a weaker draft"
        )
    counts = (found.get(name) for name in ("problems_without_answer", "cut_by_seconds"))
    if sum(count for count in counts if type(count) is int) != facts.get("problems"):
        reasons.append("of the others the draft guessed every token as the target does")
    return "; ".join(reasons)
