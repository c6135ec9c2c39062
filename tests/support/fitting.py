"""Shared by several tests."""

import json
from pathlib import Path

from datasets import Dataset

from hf_lossy_assist.training.dataset import Table, schema


H = 6

MODEL = {"revision": None, "model_type": "llama", "num_layers": 2, "vocab_size": 97}


def write(given: Table, folder: Path) -> Path:
    """The same as a folder of `hf-lossy collect`."""
    names = ("prompt", "kind", "position", "p", "q", "distance", "features")
    columns = {name: getattr(given, name).tolist() for name in names} | {"token": [5] * len(given)}
    columns = {name: columns[name] for name in schema(H)}
    Dataset.from_dict(columns, features=schema(H)).save_to_disk(str(folder))
    (folder / "collect.json").write_text(json.dumps(given.facts))
    return folder
