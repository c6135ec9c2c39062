"""Valid heads, profiles and models on disk, made once per process, of which the areas damage copies."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.conditions import describe_machine
from hf_lossy_assist.artifacts.profile_tables import Bins, Latency

from .models import HIDDEN, pair, tokenizer


@cache
def home() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzzing-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def head(polarity: str = "acceptable", kind: str = "linear") -> hla.Head:
    """Return a random head on the Llama draft's state (P(acceptable)) or on the target's (P(important))."""
    torch.manual_seed(1)
    target, draft = pair()
    spec = hla.FeatureSpec() if polarity == "acceptable" else hla.FeatureSpec("target", "token")
    config = hla.HeadConfig(
        HIDDEN, kind, 4 if kind == "mlp" else None, "sprinter" if polarity == "acceptable" else "autojudge", polarity, "made at random",
        spec, hla.ModelIdentity.of(target), hla.ModelIdentity.of(draft), threshold=0.4,
    )  # fmt: skip
    return (hla.MLPHead if kind == "mlp" else hla.LinearHead)(config)


def profile(gamma: int = 4) -> hla.Profile:
    """Return a profile of the Llama pair with the draft as companion, with invented figures."""
    target, draft = pair()
    tokens = np.array([[0, 2, gamma], [0, 4, 2 * gamma]])
    batches = np.array([1, 2])
    latency = Latency(batches, tokens, 1.0 + 0.1 * tokens, *np.full((3, 2), 0.1))
    cells = np.array([[0.2, 0.5], [0.4, 0.9]])
    bins = Bins(
        np.array([0.5], np.float32), np.full((2, 1), 0.5, np.float32), cells, cells.mean(axis=1), np.full((2, 2), 9)
    )
    facts: dict[str, Any] = {
        name: hla.ModelIdentity.of(model)
        for name, model in (("target", target), ("draft", draft), ("companion", draft))
    }
    facts |= {"tokenizer_hash": "", "decoding": {}, "machine": describe_machine(torch.device("cpu"))}
    return hla.Profile(bins, latency, gamma, np.array([1.5, 1.5]), **facts)


@cache
def saved(what: str) -> Path:
    """Return the folder of a head ("head", "mlp", "judge_head"), of a "profile", of a "companion", or of the models ("target", "draft")."""
    folder = home() / what
    if what in ("head", "mlp", "judge_head"):
        head(
            "important" if what == "judge_head" else "acceptable", "mlp" if what == "mlp" else "linear"
        ).save_pretrained(folder)
    elif what == "profile":
        profile().save_pretrained(folder)
    else:
        hla.disable(pair()[0])
        pair()[what != "target"].save_pretrained(folder)
        hla.enable(pair()[0])
        tokenizer().save_pretrained(folder)
    return folder


def copied(what: str, folder: Path) -> Path:
    """Return a copy of the folder, to damage."""
    return Path(shutil.copytree(saved(what), folder / what))
