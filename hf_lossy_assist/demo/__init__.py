"""The embedded demo: a task, a tokenizer and three small trained models, so that everything runs without a network."""

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..artifacts.head import Head
from ..artifacts.loading import load_model, load_tokenizer
from ..artifacts.sv_profile import Profile
from ..drafters.io import load_drafter
from ..drafters.trained import DSparkDrafter, Eagle3Drafter
from ..tasks.demo_task import WordProblem as Problem
from ..tasks.demo_task import answer, problems
from ..validation import nearest


__all__ = ["FOLDER", "Demo", "Problem", "answer", "drafter", "head", "load", "problems", "profile"]

FOLDER = Path(__file__).parent / "models"


class Demo(NamedTuple):
    """Result of `load`: three causal models with one vocabulary, in evaluation mode, and their tokenizer (left-padding)."""

    target: PreTrainedModel
    draft: PreTrainedModel
    companion: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Demo:
    """Load the shipped models. They are stored in float16; `dtype` is their compute dtype."""
    target, draft, companion = (
        load_model(str(FOLDER / name), dtype=dtype).to(device).eval() for name in ("target", "draft", "companion")
    )
    for name, model in (("target", target), ("draft", draft), ("companion", companion)):
        model.config.name_or_path = f"demo-{name}"  # recorded by heads; a path would differ between machines
    return Demo(target, draft, companion, load_tokenizer(str(FOLDER / "target")))


HEADS = ("sprinter", "autojudge", "specdec")


def head(method: str = "sprinter") -> Head:
    """Load the shipped head of a method for the demo's target and draft.

    "sprinter" comes from `hf-lossy collect --prompts demo` and `fit sprinter`, "autojudge" from `mine --task demo` and `fit autojudge`, "specdec"
    (for `SpecDecPP`) from `collect --for specdec --prompts demo` and `fit specdec`.
    """
    if method not in HEADS:
        raise ValueError(f"demo.head: {nearest('method', str(method), HEADS)}")
    return Head.from_pretrained(FOLDER / f"{method}_head")


DRAFTERS = ("eagle3", "dspark")


def drafter(kind: str = "eagle3") -> Eagle3Drafter | DSparkDrafter:
    """Load a shipped drafter of the demo's target, from `hf-lossy collect --for eagle3 --prompts demo` and `fit eagle3` or `fit dspark`."""
    if kind not in DRAFTERS:
        raise ValueError(f"demo.drafter: {nearest('kind', str(kind), DRAFTERS)}")
    loaded = load_drafter(FOLDER / f"{kind}_drafter")
    assert isinstance(loaded, Eagle3Drafter | DSparkDrafter)
    return loaded


def profile() -> Profile:
    """Load the shipped profile of the demo's three models, from `hf-lossy profile --prompts demo`, measured on another machine."""
    return Profile.from_pretrained(FOLDER / "sv_profile")
