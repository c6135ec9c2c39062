"""Shared by several tests."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk

from hf_lossy_assist import demo
from hf_lossy_assist.methods.sprinter.collect import collect
from hf_lossy_assist.methods.sprinter.collect_runner import CollectSettings
from hf_lossy_assist.tasks.prompts import PromptText
from support import small, tiny


@cache
def models() -> demo.Demo:
    return demo.load()


@cache
def tiny_pair() -> tuple[Any, Any, Any]:
    """A target, a draft that often differs from it, and their tokenizer; nothing ends a text."""
    target = tiny.build("llama", eos_token_id=None)
    return target, tiny.noisy(target, 0.3), small.tokenizer()


def word_prompts(*lengths: int, seed: int = 0) -> list[PromptText]:
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randint(0, 90, (length,), generator=generator).tolist() for length in lengths]
    return [PromptText(" ".join(f"w{n}" for n in one)) for one in numbers]


def rows_of(folder: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The records of each (prompt, kind), in order."""
    out: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for record in load_from_disk(str(folder)):
        out.setdefault((record["prompt"], record["kind"]), []).append(record)
    return out


def run(where: Path, pair: Any, given: list[PromptText], name: str = "data", **settings: Any) -> Any:
    target, draft, tokenizer = pair
    return rows_of(collect(target, draft, tokenizer, given, where / name, CollectSettings(**settings)))
