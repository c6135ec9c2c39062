"""The program's default dtype is no part of a decision: coins have float32's resolution under any."""

import pytest
import torch
from support.blocks import decide, round_of

from hf_lossy_assist.rules.base import Strict
from hf_lossy_assist.rules.block import SyntheticForBenchmarks


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def default(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def block_of(rows, sampling):
    """`rows` drafted tokens, certain in the draft; the target gives each 1e-4."""
    scores = torch.zeros(rows, 2, 2, dtype=torch.float32)
    scores[..., 1] = torch.tensor(1e-4, dtype=torch.float32).logit()
    tokens = torch.ones(rows, 1, dtype=torch.int64)
    return round_of(tokens, torch.ones(rows, dtype=torch.int64), None, sampling, None, scores)


def test_an_unlikely_token_is_as_unlikely_under_any_default(default):
    """1e-4 is well below the steps of bfloat16's and float16's uniform numbers, whose zero would accept it."""
    accepted = decide(Strict(), block_of(200_000, True)).accepted.sum()
    assert 2 <= accepted <= 50  # 20 expected; 1/256 of them would be 781, 1/2048 98


def test_the_synthetic_rule_too(default):
    assert 2 <= decide(SyntheticForBenchmarks(1e-4), block_of(200_000, False)).accepted.sum() <= 50
