"""Write docs/results.md, the outcome of every table, from the results of `run.py`, which has the verdicts."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from claims import CANNOT, CONFIRMED, DIRECTION, NOT_CONFIRMED
from paper_tables import PaperTable


HEAD = """# The papers' tables on the demo models

`make reproduce` writes this page. Each table has a file in `examples/reproduce/tables/`: the claim, the authors' set-up, the policies,
problems and models that run here, and the rules, which were written before the run. No verdict is written by hand.

- **confirmed in size**: the whole 95 % interval is beyond the least published figure. **direction only**: it is on the claim's side of
  the rule's bound, and not beyond that figure. **not confirmed**: the interval includes the bound, or is below or above it. **cannot be tested here**: this
  machine lacks what the claim is about.
- A verdict is about small models on word problems and one processor. It does not judge the authors' measurements.
- Where a run names other models, they are the demo's, changed so that the claim's regime holds: `width` pads the target's MLPs with
  neurons of zero weights (the same logits, the cost of a larger model), `noise` makes a draft guess worse, `layers` exits early.
- Intervals: Student's of the logarithm, over batches of prompts (speed) or over prompts and repeats (the rest); Clopper and Pearson's bound for harmed answers.

`python examples/reproduce/run.py --published` prints the papers' claims and own experiments, `--only svip-figure-5` measures one table;
`examples/reproduce/baselines.py` is `hf-lossy` with the papers' baselines.
"""


def page(tables: Mapping[str, PaperTable], results: Mapping[str, dict[str, Any]]) -> str:
    """Return the page as Markdown."""
    parts = [HEAD, _about(results)]
    for paper in dict.fromkeys(table.paper for table in tables.values()):
        parts.append(f"## {paper}\n")
        for table in tables.values():
            if table.paper == paper:
                parts.append(_table(table, results.get(table.name)))
    return "\n".join(parts).rstrip() + "\n"


def _about(results: Mapping[str, dict[str, Any]]) -> str:
    """Return the number of claims per verdict, the machines and the dates."""
    counts = Counter(check["verdict"] for result in results.values() for check in result["checks"])
    seconds = sum(result["seconds"] for result in results.values())
    lines = ["| verdict | claims |", "|---|---|"]
    lines += [f"| {verdict} | {counts[verdict]} |" for verdict in (CONFIRMED, DIRECTION, NOT_CONFIRMED, CANNOT)]
    machines = dict.fromkeys(_machine(result) for result in results.values())
    lines += ["", f"{len(results)} tables in {seconds / 60:.0f} minutes. " + " ".join(machines), ""]
    return "\n".join(lines)


def _machine(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    note = f" {result['note']}" if result["note"] else ""
    return f"Measured on {result['date']}: {result['machine']}; {versions}.{note}"


def _table(table: PaperTable, result: dict[str, Any] | None) -> str:
    lines = [f"### {table.where}\n"]
    command = f"`--only {table.name}`"
    if result is None:
        return "\n".join([*lines, f"Not measured yet: {command}\n"])
    lines += ["| claim | published | our figure (95 %) | verdict |", "|---|---|---|---|"]
    for check in result["checks"]:
        why = f": {check['why']}" if check["why"] else ""
        cells = [_cell(check[name]) for name in ("says", "published", "shown")]
        lines.append(f"| {' | '.join(cells)} | **{check['verdict']}**{_cell(why)} |")
    lines += ["", f"{command}\n"]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
