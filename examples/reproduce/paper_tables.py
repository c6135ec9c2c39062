"""The papers' tables: each one's claims, runs and rules. One JSON file each, in tables/."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


FOLDER = Path(__file__).with_name("tables")
KINDS = ("compare", "information", "heads", "texts", "long", "flops")
RATIOS = {  # of two arms, or of one arm alone, and what the figure is in words
    "speed": "tokens/s",
    "tokens_per_call": "tokens a call",
    "accepted": "accepted of verified",
    "verified": "verified for each new token",
    "computed": "positions of the target for each new token",
    "right": "right",
    "rougeL": "ROUGE-L",
}
TEXTS = ("entropy", "kl", "delta", "misfit", "follows", "by_token")  # of the target's texts, read by the draft
LONG = (
    "long_speed",
    "growth",
)  # of two policies, over long texts: a ratio of speeds, and that in the last part ÷ that in the first
FIGURES = (*RATIOS, *TEXTS, *LONG, "flops", "harm", "win_tie", "information", "positive", "auroc")
BOUNDS = ("above", "below", "at_most")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim of a table, and the rule by which a run confirms it, written before anything is measured.

    Args:
        says: the claim, for people. cannot: why it cannot be tested; then there is no rule.
        published: the figure of the paper, for people. size: the least of it as a number, on the rule's side of its bound.
        run: which of the table's runs; default: the first. figure: one of `FIGURES`.
        arm, beside: the two arms to compare; without `beside` the arm's figure alone. batch_size: if there are several.
            Of "delta", "misfit" and "follows": two stops of `TargetText.lengths`. Of "auroc": a head of the run.
        pair, cells, beside_cells: of "information" and "positive": which pair of models, and in which cells.
        above, below, at_most: bounds of the figure's whole 95 % interval.
    """

    says: str
    published: str | None = None
    size: float | None = None
    cannot: str | None = None
    run: str | None = None
    figure: str | None = None
    arm: str | None = None
    beside: str | None = None
    batch_size: int | None = None
    pair: str | None = None
    cells: str | None = None
    beside_cells: str | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper. `runs`: the demo pair's runs, by name; `published`: the authors' experiment."""

    name: str
    paper: str
    where: str
    claim: str
    published: dict[str, Any]
    runs: dict[str, dict[str, Any]]
    checks: tuple[Check, ...] = field(default_factory=tuple)

    def find_run(self, check: Check) -> dict[str, Any]:
        """Return the run of a check."""
        return self.runs[check.run if check.run is not None else next(iter(self.runs))]


def read_tables(folder: Path = FOLDER) -> dict[str, PaperTable]:
    """Read all tables by name. Raise `ValueError`, one line with the file, for an invalid one."""
    return {path.stem: read_table(path) for path in sorted(folder.glob("*.json"))}


def read_table(path: Path) -> PaperTable:
    """Read and check one file."""
    given = json.loads(path.read_text(encoding="utf-8"))
    expected = [field.name for field in fields(PaperTable) if field.name != "name"]
    if not isinstance(given, dict) or sorted(given) != sorted(expected):
        raise ValueError(f"{path}: expected an object with {', '.join(expected)}")
    try:
        table = PaperTable(path.stem, **(given | {"checks": tuple(Check(**check) for check in given["checks"])}))
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, run in table.runs.items():
        if run.get("kind") not in KINDS:
            raise ValueError(f"{path}: run {name}: expected a kind of {', '.join(KINDS)}, got {run.get('kind')!r}")
    for check in table.checks:
        reason = _wrong(table, check)
        if reason is not None:
            raise ValueError(f"{path}: {check.says!r}: {reason}")
    return table


def _wrong(table: PaperTable, check: Check) -> str | None:
    """Return why a check is invalid, or None."""
    if (check.cannot is None) == (check.figure is None):
        return "expected a figure, or why there is none (cannot)"
    if check.cannot is not None:
        return None
    if check.figure not in FIGURES:
        return f"expected a figure of {', '.join(FIGURES)}, got {check.figure!r}"
    if sum(getattr(check, bound) is not None for bound in BOUNDS) != 1:
        return f"expected one of {', '.join(BOUNDS)}"
    if check.run is not None and check.run not in table.runs:
        return f"there is no run {check.run!r}"
    return _wrong_size(check) or _wrong_names(table.find_run(check), check)


def _wrong_size(check: Check) -> str | None:
    (bound,) = (value for name in BOUNDS if (value := getattr(check, name)) is not None)
    if check.size is not None and (check.size < bound if check.above is not None else check.size > bound):
        return f"the published size {check.size:g} is not beyond the rule's bound {bound:g}"
    return None


def _wrong_names(run: dict[str, Any], check: Check) -> str | None:
    """Return what the check names and its run lacks, or None."""
    needs = {"information": "information", "positive": "information", "auroc": "heads", "flops": "flops"}
    needs |= dict.fromkeys(TEXTS, "texts") | dict.fromkeys(LONG, "long")
    if run["kind"] != needs.get(check.figure or "", "compare"):
        return f"{check.figure} is no figure of a run of kind {run['kind']}"
    if check.figure == "information":
        return None if check.pair in run["pairs"] else f"there is no pair {check.pair!r}"
    if check.figure == "auroc":
        return None if check.arm in run["heads"] else f"there is no head {check.arm!r}"
    if run["kind"] not in ("compare", "long", "flops"):
        return None
    arms = [*["target"] * (run["kind"] == "compare"), *run.get("policies", {}), *run.get("configs", {})]
    wanted = [check.arm, "target" if check.figure == "harm" else check.beside or check.arm]
    if any(arm not in arms for arm in wanted):
        return f"expected arms of {', '.join(arms)}, got {wanted}"
    if check.batch_size is not None and check.batch_size not in run.get("batch_sizes", [1]):
        return f"no batches of {check.batch_size} are measured"
    return None
