"""Write and read the dataset of drafted tokens for the heads of SPRINTER and SpecDec++."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..artifacts.cards import data_card
from ..artifacts.conditions import check_sampling
from ..artifacts.features import FeatureSpec
from ..artifacts.files import JSONObject
from ..artifacts.identity import ModelIdentity
from ..registry import find_method_for_head
from ..validation import MOST_FACTOR, check_number
from .run_folder import RunFolder, finish_dataset, load_rows, name_unreadable, open_dataset


if TYPE_CHECKING:
    from datasets import Dataset, Features

KINDS = ("original", "draft", "target", "mixed")  # SPRINTER's
REPLACED = "replaced"  # SpecDec++'s
RECORD = "collect.json"
FIGURES = ("p", "q", "distance", "prompt", "kind", "position")  # columns of one number that are read


def label_acceptable(p: torch.Tensor, q: torch.Tensor, lam: float) -> torch.Tensor:
    """Return SPRINTER's label, q(x) ≤ λ·p(x) (§3.2; λ = 1.2 in the paper's experiments)."""
    return q <= lam * p


def make_schema(hidden_size: int, kinds: Sequence[str] = KINDS) -> "Features":
    """Return the columns of the dataset."""
    from datasets import ClassLabel, Features, List, Value

    return Features(
        {
            "prompt": Value("int32"),  # number of the prompt, whose rows stay on one side of every split
            "kind": ClassLabel(names=list(kinds)),
            "position": Value("int32"),  # new tokens before it in its row
            "token": Value("int32"),  # proposed by the draft
            "p": Value("float32"),
            "q": Value("float32"),
            "distance": Value("float32"),  # d_TV(p, q) of the two distributions here
            "features": List(Value("float32"), length=hidden_size),
        }
    )


def make_data_card(facts: JSONObject, data: "Dataset") -> str:
    """Return the README.md of a dataset as text."""
    p, q, kind = (torch.tensor(data[name][:]) for name in ("p", "q", "kind"))
    fits = label_acceptable(p, q, facts["settings"]["lam"]).float()
    counts = [(name, kind == k) for k, name in enumerate(data.features["kind"].names)]
    table = [(name, int(rows.sum()), float(fits[rows].sum() / rows.sum().clamp(min=1))) for name, rows in counts]
    features = FeatureSpec(**facts["settings"]["features"])
    method = find_method_for_head("acceptable", features.position)
    target = ModelIdentity.from_dict(facts["target"])
    shown = {"table": table, "method": method, "tokens": len(data), "target": target, "features": features}
    return data_card("data.md", method.name, facts, **shown)


def assemble(run: RunFolder, names: Sequence[str]) -> None:
    """Combine the units `names` of a run, in order."""
    from datasets import Dataset

    def make(cache: Path) -> "Dataset":
        return Dataset.from_parquet([str(run.part / name) for name in names], cache_dir=str(cache))

    finish_dataset(run, run.facts, make, make_data_card)


@dataclass
class VerifierDataset:
    """A collected dataset as tensors: N records, in the order of the rows."""

    features: torch.Tensor  # (N, H) float32
    p: torch.Tensor  # (N,) float32
    q: torch.Tensor  # (N,)
    distance: torch.Tensor  # (N,)
    prompt: torch.Tensor  # (N,) int64
    kind: torch.Tensor  # (N,) int64   index into `kinds`
    position: torch.Tensor  # (N,) int64
    kinds: list[str]
    facts: JSONObject  # collect.json

    def of(self, rows: torch.Tensor) -> "VerifierDataset":
        """Return the records selected by `rows` (N,) bool."""
        selected = {name: getattr(self, name)[rows] for name in ("features", *FIGURES)}
        return VerifierDataset(**selected, kinds=self.kinds, facts=self.facts)

    def __len__(self) -> int:
        return len(self.p)


def read_dataset(path: str | Path) -> VerifierDataset:
    """Return the dataset written by `collect`.

    Raises: `ValueError`, one line, for any other folder.
    """
    path = Path(path)
    facts = open_dataset(path, RECORD, "hf-lossy collect")
    data = load_rows(path)
    with name_unreadable(path):
        FeatureSpec(**facts["settings"]["features"])
        check_number("lam", facts["settings"]["lam"], 0.0, MOST_FACTOR)
        check_sampling(facts["settings"])
        for name in ("target", "draft"):
            ModelIdentity.from_dict(facts[name])
        column = data.with_format("torch", columns=["features", *FIGURES])[:]
        for name, values in column.items():
            if not values.isfinite().all():  # a label's comparison would accept NaN
                raise ValueError(f"{name} has values that are NaN or infinite")
        return VerifierDataset(**column, kinds=data.features["kind"].names, facts=facts)
