"""Write and read the dataset of drafted tokens for the heads of SPRINTER and SpecDec++."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..artifacts.cards import data_card, escape
from ..artifacts.conditions import check_decoding
from ..artifacts.features import FeatureSpec
from ..artifacts.identity import ModelIdentity
from ..artifacts.json_io import JSONObject
from ..registry import find_method_for_head
from ..validation import MOST, MOST_FACTOR, check_int, check_number, one_line
from .finished_dataset import check_entries, check_files, finish_dataset, load_rows, open_dataset
from .resumable import compute_key, name_shards, read_part


if TYPE_CHECKING:
    from datasets import Dataset, Features

KINDS = ("original", "draft", "target", "mixed")  # SPRINTER's
REPLACED = "replaced"  # SpecDec++'s
RECORD = "collect.json"
ROUNDING = 1e-3  # by which a float32 probability, summed over a vocabulary, may exceed 1


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
    facts = escape(facts)
    p, q, kind = (torch.tensor(data[name][:]) for name in ("p", "q", "kind"))
    fits = label_acceptable(p, q, facts["settings"]["lam"]).float()
    counts = [(name, kind == k) for k, name in enumerate(data.features["kind"].names)]
    table = [(name, int(rows.sum()), float(fits[rows].sum() / rows.sum().clamp(min=1))) for name, rows in counts]
    features = FeatureSpec(**facts["settings"]["features"])
    found = find_method_for_head("acceptable", features.position)
    target = ModelIdentity.from_dict(facts["target"])
    shown = {"table": table, "method": found, "tokens": len(data), "target": target, "features": features}
    return data_card("data.md", found.name, facts, **shown)


def assemble(out: Path, part: Path, facts: Mapping[str, object], count: int) -> None:
    """Combine the files of `count` batches, in order, and remove them."""
    from datasets import Dataset, concatenate_datasets

    key = compute_key(part / RECORD)
    files = [part / name for name in name_shards(count, "parquet")]
    for file in files:
        if read_part(file, key) is None:
            raise ValueError(f"{file} is missing: resume")

    def make(cache: Path) -> "Dataset":
        return concatenate_datasets([Dataset.from_parquet(str(file), cache_dir=str(cache)) for file in files])

    finish_dataset(out, part, RECORD, facts, make, make_data_card)


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
        parts = {n: getattr(self, n)[rows] for n in ("features", "p", "q", "distance", "prompt", "kind", "position")}
        return VerifierDataset(**parts, kinds=self.kinds, facts=self.facts)

    def __len__(self) -> int:
        return len(self.p)

    def check_for(self, method: str, position: str) -> None:
        """Refuse data whose states are not at the position that this method's head reads."""
        spec = FeatureSpec(**self.facts["settings"]["features"])
        if spec.position != position:
            other = find_method_for_head("acceptable", spec.position).name
            raise ValueError(
                f"this dataset holds the {spec}: it is for hf-lossy fit {other}. Collect again with --for {method}"
            )


def read_dataset(path: str | Path) -> VerifierDataset:
    """Return the dataset written by `collect`.

    Raises: `ValueError`, one line, for a folder that is something else, unfinished or damaged.
    """
    path = Path(path)
    facts = open_dataset(path, RECORD, "hf-lossy collect")
    _check_record(facts, path / RECORD)
    check_files(path, facts)
    kinds, column = _read_columns(path)
    if column["features"].shape[1:] != (facts["hidden_size"],):
        raise ValueError(
            f"{path} holds {column['features'].shape[-1]} numbers of each state, and its {RECORD} says {facts['hidden_size']}: collect it "
            "again"
        )
    if not column["features"].isfinite().all():
        raise ValueError(f"{path} holds states that are NaN or infinite: collect it again")
    vocabulary = max(ModelIdentity.from_dict(facts[name]).vocab_size for name in ("target", "draft"))
    highest = dict.fromkeys(("p", "q", "distance"), 1 + ROUNDING) | {
        "kind": len(kinds) - 1,
        "position": MOST,
        "token": vocabulary - 1,
        "prompt": facts["prompts"] - 1,
    }
    for name, high in highest.items():
        values = column[name]
        if not ((values >= 0) & (values <= high)).all():  # NaN too, which a label's comparison would accept
            raise ValueError(
                f"{path}: {name} is from {values.min()} to {values.max()}, expected 0 to {high:.0f}: collect it again"
            )
    return VerifierDataset(
        features=column["features"].float(),
        **{name: column[name].float() for name in ("p", "q", "distance")},
        **{name: column[name].long() for name in ("prompt", "kind", "position")},
        kinds=kinds,
        facts=facts,
    )


def _read_columns(path: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the names of the kinds of rows, and every column."""
    data = load_rows(path)
    try:
        kinds, data = data.features["kind"].names, data.with_format("numpy")
        columns = {name: data[name][:] for name in make_schema(1)}
        columns["features"] = np.stack(columns["features"])
        return kinds, {name: torch.from_numpy(np.asarray(values)) for name, values in columns.items()}
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({one_line(f'{type(error).__name__}: {error}')}): collect it again"
        ) from None


def _check_record(facts: JSONObject, where: Path) -> None:
    """Refuse a record that lacks entries needed for fitting."""
    texts = dict.fromkeys(("tokenizer_hash", "source"), str)
    objects = dict.fromkeys(("settings", "target", "draft", "versions"), dict)
    check_entries(facts, objects | texts | dict.fromkeys(("prompts", "hidden_size"), int), where)
    settings = facts["settings"]
    check_entries(settings, {"lam": (int, float), "features": dict}, where)
    try:
        for name in ("target", "draft"):
            identity = ModelIdentity.from_dict(facts[name])
        check_int("prompts", facts["prompts"], 1)
        check_int("hidden_size", facts["hidden_size"], identity.hidden_size, identity.hidden_size)
        check_number("lam", settings["lam"], 0.0, MOST_FACTOR)
        check_decoding(settings)
        features, mix = FeatureSpec(**settings["features"]), settings.get("mix")
        if features.model != "draft":
            raise ValueError(f"features: expected a state of the draft, got the {features}")
        if mix is not None or features.position == "token":  # SpecDec++'s, see `collect`
            check_number("mix", mix, 0.0, 1.0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}: collect it again") from None
