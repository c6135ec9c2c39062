"""The dataset of verifier data: its columns, its folder, and how it is read."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import DatasetCard, DatasetCardData

from ..cards import TEMPLATES, escaped
from ..features import FeatureSpec
from ..files import new_folder, write_text
from ..identity import ModelIdentity


KINDS = ("original", "draft", "target", "mixed")  # SPRINTER's
REPLACED = "replaced"  # SpecDec++'s
WHOLE = "whole"  # where the dataset is put together, inside the folder of the unfinished collection


def acceptable(p: torch.Tensor, q: torch.Tensor, lam: float) -> torch.Tensor:
    """SPRINTER's label: q(x) ≤ λ·p(x) (§3.2; λ = 1.2 in the paper's experiments)."""
    return q <= lam * p


def schema(hidden_size: int, kinds: Sequence[str] = KINDS) -> Any:
    """The columns of the dataset."""
    from datasets import ClassLabel, Features, List, Value

    return Features(
        {
            "prompt": Value("int32"),  # number of the prompt: rows of one prompt stay on one side of every split
            "kind": ClassLabel(names=list(kinds)),
            "position": Value("int32"),  # new tokens before it in its row
            "token": Value("int32"),  # what the draft proposes
            "p": Value("float32"),
            "q": Value("float32"),
            "distance": Value("float32"),  # d_TV(p, q) of the two laws here
            "features": List(Value("float32"), length=hidden_size),
        }
    )


# -- writing ------------------------------------------------------------------------------------------------------------


def prepare(out: Path, part: Path, facts: dict[str, Any], resume: bool, record: str = "collect.json") -> bool:
    """Make or check the folder of the unfinished run. True: the run was killed after its last step, all is there.

    `record`: the file that says what the run was started with.
    """
    if resume and part.is_dir() and (out / record).is_file():
        _compare(out / record, facts)
        shutil.rmtree(part)
        return True
    if out.exists():
        raise ValueError(f"{out} exists: choose another --out, or delete it to start again")
    written = part / record
    if written.is_file():
        if not resume:
            raise ValueError(f"{part} holds an unfinished run: pass --resume to go on, or delete it")
        _compare(written, facts)
    else:
        part.mkdir(parents=True, exist_ok=True)
        write_text(written, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    for left in part.glob("*.part"):
        left.unlink()
    for left in (
        part / WHOLE,
        *part.glob(f".{WHOLE}.*"),
    ):  # of a run that was killed while it put the dataset together
        shutil.rmtree(left, ignore_errors=True)
    return False


def _compare(written: Path, facts: dict[str, Any]) -> None:
    before = json.loads(written.read_text(encoding="utf-8"))
    before, here = ({**facts_, **facts_.get("settings", {})} for facts_ in (before, facts))
    for name in here:
        if name not in ("source", "settings", "served_at") and here[name] != before.get(name):
            raise ValueError(
                f"{written.parent} was made with {name} {before.get(name)!r}, this run has {here[name]!r}: use the same, or delete it"
            )


def data_card(facts: dict[str, Any], data: Any) -> str:
    """The README.md of a dataset, as text."""
    facts = escaped(facts)
    p, q, kind = (torch.tensor(data[name][:]) for name in ("p", "q", "kind"))
    fits = acceptable(p, q, facts["settings"]["lam"]).float()
    counts = [(name, kind == k) for k, name in enumerate(data.features["kind"].names)]
    table = [(name, int(mine.sum()), float(fits[mine].sum() / mine.sum().clamp(min=1))) for name, mine in counts]
    method = "sprinter" if facts["settings"].get("mix") is None else "specdec"
    card = DatasetCard.from_template(
        DatasetCardData(license="apache-2.0", tags=["hf_lossy_assist", method], task_categories=["text-classification"]),
        template_path=str(TEMPLATES / "data.md"), table=table, method=method, tokens=len(data), facts=facts,
        target=ModelIdentity(**facts["target"]), draft=ModelIdentity(**facts["draft"]),
        features=FeatureSpec(**facts["settings"]["features"]),
        settings=", ".join(f"{k} {v}" for k, v in facts["settings"].items() if k != "features" and v is not None),
        versions=", ".join(f"{k} {v}" for k, v in facts["versions"].items()),
    )  # fmt: skip
    return str(card)


def assemble(out: Path, part: Path, facts: dict[str, Any]) -> None:
    """Put the batches' files together, in order, and take them away."""
    from datasets import Dataset, concatenate_datasets

    with new_folder(part / WHOLE) as folder:
        cache = folder / "cache"
        shards = [Dataset.from_parquet(str(shard), cache_dir=str(cache)) for shard in sorted(part.glob("*.parquet"))]
        data = concatenate_datasets(shards)
        data.save_to_disk(str(folder))
        write_text(folder / "collect.json", json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        write_text(folder / "README.md", data_card(facts, data))
        del shards
        shutil.rmtree(cache)
    os.rename(part / WHOLE, out)
    shutil.rmtree(part)


# -- reading ------------------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """A collected dataset as tensors, N records of rows in order."""

    features: torch.Tensor  # (N, H) float32
    p: torch.Tensor  # (N,) float32
    q: torch.Tensor  # (N,)
    distance: torch.Tensor  # (N,)
    prompt: torch.Tensor  # (N,) int64
    kind: torch.Tensor  # (N,) int64   place in `kinds`
    position: torch.Tensor  # (N,) int64
    kinds: list[str]
    facts: dict[str, Any]  # collect.json

    def of(self, rows: torch.Tensor) -> "Table":
        """The records that `rows` (N,) bool names."""
        parts = {n: getattr(self, n)[rows] for n in ("features", "p", "q", "distance", "prompt", "kind", "position")}
        return Table(**parts, kinds=self.kinds, facts=self.facts)

    def __len__(self) -> int:
        return len(self.p)

    def check_for(self, method: str, position: str) -> None:
        """Refuse data whose states are not at the position that this method's head reads."""
        spec = FeatureSpec(**self.facts["settings"]["features"])
        if spec.position != position:
            other = {"sprinter": "specdec", "specdec": "sprinter"}[method]
            raise ValueError(
                f"this dataset holds the {spec}: it is for hf-lossy fit {other}. Collect again with --for {method}"
            )


def read_table(path: str | Path) -> Table:
    """The dataset that `collect` wrote."""
    from datasets import load_from_disk

    path = Path(path)
    if not (path / "collect.json").is_file():
        hint = (
            f" ({path}.partial is unfinished: hf-lossy collect --resume)" if Path(f"{path}.partial").is_dir() else ""
        )
        raise ValueError(f"{path} is no dataset of hf-lossy collect: no collect.json in it{hint}")
    data = load_from_disk(str(path))
    kinds = data.features["kind"].names
    data = data.with_format("numpy")
    column = {name: torch.from_numpy(np.stack(data[name][:]) if name == "features" else np.asarray(data[name][:]))
              for name in data.column_names}  # fmt: skip
    return Table(
        features=column["features"].float(),
        **{name: column[name].float() for name in ("p", "q", "distance")},
        **{name: column[name].long() for name in ("prompt", "kind", "position")},
        kinds=kinds,
        facts=json.loads((path / "collect.json").read_text(encoding="utf-8")),
    )
