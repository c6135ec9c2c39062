"""Write docs/results.md, the outcome of every table, from the results of `run.py`, which has the verdicts."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from claims import CANNOT, CONFIRMED, NOT_CONFIRMED
from paper_tables import PaperTable


HEAD = """# The papers' tables on the demo models

`make reproduce` writes this page. Every headline table of the four papers has a file in `examples/reproduce/tables/`: its claim, how
the authors measured it, what the demo's models do for it, and the rule that decides. The rules were
written before the run, and no verdict is written by hand.

- **confirmed**: the whole 95 % interval is on the claim's side of the rule's bound. **not confirmed**: it is not, for the reason given.
  **cannot be tested here**: the demo lacks what the claim is about.
- A verdict is about two small models on word problems and one processor. It does not judge the authors' measurements.
  If the rule requires less than the published figure, the claim's direction is tested, not its size.
- Intervals: Student's of the logarithm, over batches of prompts (speed) or over prompts and repeats (the rest); Clopper and Pearson's bound for harmed answers.

`python examples/reproduce/run.py --published` prints the models, settings, hardware and commands of the papers' own experiments.
"""


def page(tables: Mapping[str, PaperTable], results: Mapping[str, dict[str, Any]]) -> str:
    """Return the page as Markdown."""
    parts = [HEAD, _about(results)]
    first_tables: dict[str, str] = {}  # by description of the runs
    for paper in dict.fromkeys(table.paper for table in tables.values()):
        parts.append(f"## {paper}\n")
        for table in tables.values():
            if table.paper == paper:
                runs = _runs(table)
                first = first_tables.setdefault(runs, table.where)
                shown = runs if first == table.where else f"Same run as {first}."
                parts.append(_table(table, results.get(table.name), shown))
    return "\n".join(parts).rstrip() + "\n"


def _about(results: Mapping[str, dict[str, Any]]) -> str:
    """Return the number of claims per verdict, the machines and the dates."""
    counts = Counter(check["verdict"] for result in results.values() for check in result["checks"])
    seconds = sum(result["seconds"] for result in results.values())
    lines = ["| verdict | claims |", "|---|---|"]
    lines += [f"| {verdict} | {counts[verdict]} |" for verdict in (CONFIRMED, NOT_CONFIRMED, CANNOT)]
    machines = dict.fromkeys(_machine(result) for result in results.values())
    lines += ["", f"{len(results)} tables in {seconds / 60:.0f} minutes. " + " ".join(machines), ""]
    return "\n".join(lines)


def _machine(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    note = f" {result['note']}" if result["note"] else ""
    return f"Measured on {result['date']}: {result['machine']}; {versions}.{note}"


def _table(table: PaperTable, result: dict[str, Any] | None, runs: str) -> str:
    lines = [f"### {table.where}\n", f"**Claimed:** {table.claim}\n"]
    command = f"`python examples/reproduce/run.py --only {table.name}`"
    if result is None:
        return "\n".join([*lines, f"Not measured yet: {command}\n"])
    lines += ["| claim | our figure (95 %) | verdict |", "|---|---|---|"]
    for check in result["checks"]:
        why = f": {check['why']}" if check["why"] else ""
        lines.append(f"| {_cell(check['says'])} | {_cell(check['shown'])} | **{check['verdict']}**{_cell(why)} |")
    lines += ["", f"{runs} {command}\n"]
    return "\n".join(lines)


def _runs(table: PaperTable) -> str:
    """Return one sentence per run."""
    sentences = []
    for name, run in table.runs.items():
        if run["kind"] == "information":
            sentences.append(f"{run['repeats']} profiles of {run['problems']} problems for each pair, sampling.")
            continue
        how = "sampling" if run["do_sample"] else "greedy"
        sizes = ", ".join(map(str, run.get("batch_sizes", [1])))
        which = f"{name}: " if len(table.runs) > 1 else ""
        policies = "; ".join(f"{arm}: `{spec.replace('{demo}/', '')}`" for arm, spec in run["policies"].items())
        sentences.append(
            f"{which}{run['problems']} problems of seed {run['seed']}, {how}, up to {run['max_new_tokens']} new tokens, batches of {sizes}; {policies}."
        )
    return " ".join(sentences)


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
