"""Shared by several tests."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_lossy_assist.training.dataset import VerifierDataset, make_schema
from hf_lossy_assist.training.finished import hash_files


H = 6

MODEL = {"revision": None, "model_type": "llama", "num_layers": 2, "vocab_size": 97}


def write(given: VerifierDataset, folder: Path) -> Path:
    """The same as a folder of `hf-lossy collect`."""
    names = ("prompt", "kind", "position", "p", "q", "distance", "features")
    columns = {name: getattr(given, name).tolist() for name in names} | {"token": [5] * len(given)}
    columns = {name: columns[name] for name in make_schema(H)}
    Dataset.from_dict(columns, features=make_schema(H)).save_to_disk(str(folder))
    return record(folder, "collect.json", given.facts)


def record(folder: Path, name: str, facts: dict[str, Any]) -> Path:
    """Write the record of a dataset that is there, with its files."""
    (folder / name).write_text(json.dumps(facts | {"files": hash_files(folder)}))
    return folder
