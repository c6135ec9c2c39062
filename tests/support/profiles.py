"""Shared by several tests."""

import dataclasses
from functools import cache

import numpy as np
import torch

from hf_lossy_assist import ModelIdentity
from hf_lossy_assist.artifacts.conditions import describe_machine
from hf_lossy_assist.artifacts.identity import tokenizer_hash
from hf_lossy_assist.artifacts.profile_tables import Bins, Latency
from hf_lossy_assist.artifacts.sv_profile import Profile
from support import tiny
from support.small import tokenizer


GAMMA = 4

BATCHES = (1, 4, 16)


@cache
def target():
    return tiny.build("llama")


@cache
def draft():
    return tiny.noisy(target(), 0.05)


@cache
def companion():
    return tiny.noisy(target(), 0.05, seed=2)


def bins(seed=0, rows=3, columns=4):
    random = np.random.default_rng(seed)
    accept = np.sort(random.random((rows, columns)), axis=1)
    return Bins(
        np.sort(random.random(rows - 1, dtype=np.float32)), np.sort(random.random((rows, columns - 1), dtype=np.float32)),
        accept, accept.mean(axis=1), random.integers(0, 99, (rows, columns)),
    )  # fmt: skip


def latency(**changes):
    """Hand-made: a round of b rows takes 10 + b + m ms with m tokens, a draft step 1 ms and b/10 more, the companion 2 ms."""
    batches = np.array(BATCHES)
    tokens = batches[:, None] * np.array([0, 2, 3, GAMMA])
    table = {
        "batches": batches, "tokens": tokens, "seconds": (10 + batches[:, None] + tokens) / 1e3, "step": (1 + batches / 10) / 1e3,
        "companion": np.full(3, 2e-3), "noise": np.full(3, 0.01),
    }  # fmt: skip
    return Latency(**table | changes)


def profile(**changes):
    """With something in every entry."""
    fields = {
        "bins": bins(), "latency": latency(), "gamma": GAMMA, "pays": np.array([0.9, 1.1, 1.3]),
        "target": ModelIdentity.of(target()), "draft": ModelIdentity.of(draft()), "companion": ModelIdentity.of(companion()),
        "tokenizer_hash": tokenizer_hash(tokenizer()), "decoding": {"do_sample": False},
        "machine": describe_machine(torch.device("cpu")), "training": {"prompts": 40, "source": "γ"}, "metrics": {"samples": 1234},
        "versions": {"torch": "2.9"},
    }  # fmt: skip
    return Profile(**fields | changes)


def arrays(made):
    return {"pays": made.pays} | {
        f"{part}.{f.name}": getattr(getattr(made, part), f.name)
        for part in ("bins", "latency")
        for f in dataclasses.fields(getattr(made, part))
    }
