"""Collected data, and datasets of verifier records drawn from a known law, with their folders."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk

from hf_lossy_assist import demo
from hf_lossy_assist.methods.sprinter.collect import CollectSettings, collect
from hf_lossy_assist.tasks.prompts import PromptText
from hf_lossy_assist.training.verifier_dataset import REPLACED, VerifierDataset, make_schema
from support import small, tiny


models = cache(demo.load)


@cache
def tiny_pair() -> tuple[Any, Any, Any]:
    """A target, a draft that often differs from it, and their tokenizer; nothing ends a text."""
    target = tiny.build("llama", eos_token_id=None)
    return target, tiny.noisy(target, 0.3), small.tokenizer()


def word_prompts(*lengths: int, seed: int = 0) -> list[PromptText]:
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randint(0, 90, (length,), generator=generator).tolist() for length in lengths]
    return [PromptText(" ".join(f"w{n}" for n in one)) for one in numbers]


def read_rows(folder: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The records of each (prompt, kind), in order."""
    out: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for record in load_from_disk(str(folder)):
        out.setdefault((record["prompt"], record["kind"]), []).append(record)
    return out


def run(where: Path, pair: Any, given: list[PromptText], name: str = "data", **settings: Any) -> Any:
    target, draft, tokenizer = pair
    return read_rows(collect(target, draft, tokenizer, given, where / name, CollectSettings(**settings)))


H = 6

MODEL = {"revision": None, "model_type": "llama", "num_layers": 2, "vocab_size": 97}


def drawn(
    kinds: Sequence[str], prompts: int, each: int, law: Callable[[torch.Tensor], torch.Tensor], seed: int = 0, **settings: Any
) -> VerifierDataset:  # fmt: skip
    """Records whose q/p is e^(−s), s = law(x) + logistic noise, of x (N, H) from the unit normal: P(q ≤ λ·p | x) = sigmoid(law(x) + log λ)."""
    generator = torch.Generator().manual_seed(seed)
    count = prompts * len(kinds) * each
    x, places = torch.randn(count, H, generator=generator), torch.arange(count)
    ratio = (-(law(x) + torch.rand(count, generator=generator).logit())).exp()
    replaced = list(kinds) == [REPLACED]
    features = {"model": "draft", "position": "token" if replaced else "predicting", "layer": -1, "norm": True}
    defaults = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "lam": 1.2, "features": features}
    facts = {
        "settings": defaults | ({"mix": 0.15} if replaced else {}) | settings, "target": MODEL | {"id": "org/target", "hidden_size": 32},
        "draft": MODEL | {"id": "org/draft", "hidden_size": H}, "tokenizer_hash": "0" * 64, "hidden_size": H, "prompts": prompts,
        "source": "numbers drawn at random", "versions": {},
    }  # fmt: skip
    return VerifierDataset(
        features=x, p=1 / (1 + ratio), q=ratio / (1 + ratio), distance=torch.rand(count, generator=generator),
        prompt=places // (len(kinds) * each), kind=places // each % len(kinds), position=places % each, kinds=list(kinds), facts=facts,
    )  # fmt: skip


def write(given: VerifierDataset, folder: Path) -> Path:
    """The same as a folder of `hf-lossy collect`."""
    names = ("prompt", "kind", "position", "p", "q", "distance", "features")
    columns = {name: getattr(given, name).tolist() for name in names} | {"token": [5] * len(given)}
    columns = {name: columns[name] for name in make_schema(H)}
    Dataset.from_dict(columns, features=make_schema(H)).save_to_disk(str(folder))
    return record(folder, "collect.json", given.facts)


def record(folder: Path, name: str, facts: dict[str, Any]) -> Path:
    """Write the record of a dataset."""
    (folder / name).write_text(json.dumps(facts))
    return folder
