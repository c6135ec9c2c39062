"""docs/results.md: what came of every table, from the results that `run.py` keeps. Nothing here is judged."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from claims import CANNOT, CONFIRMED, NOT_CONFIRMED
from paper_tables import PaperTable


HEAD = """# The papers' tables on the demo models

`make reproduce` writes this page. Every headline table of the four papers has a file in `examples/reproduce/tables/`: what it claims, how
its authors measured it, what the demo's models do for it, and the rule by which that confirms the claim or does not. The rules were
written before the run, and no verdict is written by hand.

- **confirmed**: the whole 95 % interval is on the claim's side of the rule's bound. **not confirmed**: it is not; the reason stands beside it.
  **cannot be tested here**: the demo lacks what the claim is about.
- A verdict is about two small models on word problems and one processor: that a claim carries over to them, or does not. It says nothing of whether the
  authors measured what they report. Where the rule asks for less than the published figure, the claim's direction is tested, not its size.
- Intervals: Student's of the logarithm, over batches of prompts (speed) or over prompts and repeats (the rest); Clopper and Pearson's bound for harmed answers.

`python examples/reproduce/run.py --published` prints the models, settings, hardware and commands of the papers' own experiments.
"""


def page(tables: Mapping[str, PaperTable], results: Mapping[str, dict[str, Any]]) -> str:
    """The page, of those tables that there are results for."""
    parts = [HEAD, _about(results)]
    told: dict[str, str] = {}  # what was run, and the table that says so first
    for paper in dict.fromkeys(table.paper for table in tables.values()):
        parts.append(f"## {paper}\n")
        for its in tables.values():
            if its.paper == paper:
                runs = _runs(its)
                first = told.setdefault(runs, its.where)
                said = runs if first == its.where else f"The same run as that of {first}."
                parts.append(_table(its, results.get(its.name), said))
    return "\n".join(parts).rstrip() + "\n"


def _about(results: Mapping[str, dict[str, Any]]) -> str:
    """Verdicts by count, and where and when."""
    counts = Counter(its["verdict"] for result in results.values() for its in result["checks"])
    seconds = sum(result["seconds"] for result in results.values())
    lines = ["| verdict | claims |", "|---|---|"]
    lines += [f"| {verdict} | {counts[verdict]} |" for verdict in (CONFIRMED, NOT_CONFIRMED, CANNOT)]
    where = dict.fromkeys(_place(result) for result in results.values())
    lines += ["", f"{len(results)} tables in {seconds / 60:.0f} minutes. " + " ".join(where), ""]
    return "\n".join(lines)


def _place(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    note = f" {result['note']}" if result["note"] else ""
    return f"Measured on {result['date']}: {result['machine']}; {versions}.{note}"


def _table(table: PaperTable, result: dict[str, Any] | None, runs: str) -> str:
    lines = [f"### {table.where}\n", f"**Claimed:** {table.claim}\n"]
    command = f"`python examples/reproduce/run.py --only {table.name}`"
    if result is None:
        return "\n".join([*lines, f"Not measured yet: {command}\n"])
    lines += ["| claim | our figure (95 %) | verdict |", "|---|---|---|"]
    for its in result["checks"]:
        why = f": {its['why']}" if its["why"] else ""
        lines.append(f"| {_cell(its['says'])} | {_cell(its['shown'])} | **{its['verdict']}**{_cell(why)} |")
    lines += ["", f"{runs} {command}\n"]
    return "\n".join(lines)


def _runs(table: PaperTable) -> str:
    """What was run, in a sentence."""
    said = []
    for name, run in table.runs.items():
        if run["kind"] == "information":
            said.append(f"{run['repeats']} profiles of {run['problems']} problems for each pair, sampling.")
            continue
        how = "sampling" if run["do_sample"] else "greedy"
        sizes = ", ".join(map(str, run.get("batch_sizes", [1])))
        which = f"{name}: " if len(table.runs) > 1 else ""
        policies = "; ".join(f"{arm}: `{spec.replace('{demo}/', '')}`" for arm, spec in run["policies"].items())
        said.append(
            f"{which}{run['problems']} problems of seed {run['seed']}, {how}, up to {run['max_new_tokens']} new tokens, batches of {sizes}; {policies}."
        )
    return " ".join(said)


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
