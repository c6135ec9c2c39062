"""Shared by several tests."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from hypothesis import strategies as st

from hf_lossy_assist import SVIP, AcceptanceRule, Confidence, Constant, Heuristic


lengths = st.integers(1, 10_000)

amounts = st.floats(0, 1e6) | st.integers(0, 50) | st.just(math.inf)

stops = st.one_of(
    st.builds(Constant, lengths),
    lengths.flatmap(lambda n: st.builds(Heuristic, st.just(n), st.integers(n, 20_000))),
    st.builds(Confidence, st.floats(0, 1), lengths),
    st.builds(SVIP, amounts, amounts, st.sampled_from(["bound", "entropy"]), lengths),
)


@dataclass(frozen=True)
class Unregistered(AcceptanceRule):
    """A lossy rule of a user's own, in no dict of this package."""

    lossless: ClassVar[bool] = False

    def probability(self, block):
        return torch.ones(block.tokens.shape)
