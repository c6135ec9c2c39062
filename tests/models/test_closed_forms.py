"""The closed forms of states behind a block's first tokens are what the recurrences of Transformers' own files leave behind those tokens."""

import sys
from dataclasses import replace

import pytest
import torch
from support import hybrids

from hf_lossy_assist.models.recurrent import closed_forms, recording
from hf_lossy_assist.models.recurrent.closed_forms import states_after
from hf_lossy_assist.models.recurrent.recording import RecordedCall
from hf_lossy_assist.models.recurrent.steps import RowLengths
from hf_lossy_assist.models.row_model import RowModel


ROWS, WIDTH, HEADS, KEYS, VALUES = 4, 7, 6, 5, 3
ENDS = RowLengths([0, 1, 4, 7])
FILES = {
    "torch_chunk_gated_delta_rule": "qwen3_5_text",
    "chunk_kimi_delta_attention": "kimi_linear",
    "mamba2_chunk_scan": "mamba2",
}


def delta(seed, groups=1, by_channel=False, normed=True):
    """Arguments of a gated delta rule, some of whose tokens forget all."""
    torch.manual_seed(seed)
    decay = -torch.rand(ROWS, WIDTH, HEADS, *[KEYS] * by_channel) * torch.tensor([0.1, 1.0, 40.0]).repeat(
        HEADS // 3
    ).view(HEADS, *[1] * by_channel)
    query, key = torch.randn(2, ROWS, WIDTH, HEADS // groups, KEYS)
    value, beta = torch.randn(ROWS, WIDTH, HEADS, VALUES), torch.rand(ROWS, WIDTH, HEADS)
    return {
        "query": query, "key": key / key.norm(dim=-1, keepdim=True), "value": value, "g": decay, "beta": beta,
        "output_final_state": True, "use_qk_l2norm_in_kernel": normed, "initial_state": None,
    }  # fmt: skip


def mamba(seed, groups=1):
    """Arguments of a Mamba-2 scan."""
    torch.manual_seed(seed)
    b, c = torch.randn(2, ROWS, WIDTH, HEADS // groups, VALUES)
    return {
        "hidden_states": torch.randn(ROWS, WIDTH, HEADS, KEYS), "dt": torch.randn(ROWS, WIDTH, HEADS), "A": -torch.rand(HEADS) * 9,
        "B": b, "C": c, "chunk_size": 8, "D": torch.randn(HEADS), "dt_bias": torch.randn(HEADS), "dt_softplus": True,
        "dt_limit": (0.01, torch.inf), "return_final_states": True, "initial_states": None,
    }  # fmt: skip


CASES = {
    "plain": ("torch_chunk_gated_delta_rule", {}),
    "grouped heads": ("torch_chunk_gated_delta_rule", {"groups": 2}),
    "keys as they are": ("torch_chunk_gated_delta_rule", {"normed": False}),
    "by channel": ("chunk_kimi_delta_attention", {"by_channel": True}),
    "mamba": ("mamba2_chunk_scan", {}),
    "mamba, grouped heads": ("mamba2_chunk_scan", {"groups": 3}),
}


def calls(case):
    """Two layers' calls and the states before them, the second's being none."""
    name, settings = CASES[case]
    module = sys.modules[type(hybrids.model(FILES[name])).__module__]
    made = [(mamba if name == "mamba2_chunk_scan" else delta)(seed, **settings) for seed in (0, 1)]
    return [RecordedCall(name, getattr(module, name), arguments) for arguments in made], [
        torch.randn(ROWS, HEADS, KEYS, VALUES),
        None,
    ]


@pytest.mark.parametrize("at_once", [1, closed_forms.NUMBERS], ids=["alone", "together"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_state_of_the_model_files_recurrence(case, at_once, monkeypatch):
    monkeypatch.setattr(closed_forms, "NUMBERS", at_once)
    layers, states = calls(case)
    like = torch.zeros(ROWS, HEADS, KEYS, VALUES)
    wanted = [
        call.again(state, ENDS.on(torch.device("cpu")), ENDS.most) for call, state in zip(layers, states, strict=True)
    ]
    blocks = [call.block(state, like) for call, state in zip(layers, states, strict=True)]
    before = None if states[0] is None else states[0].clone()
    found = states_after(blocks, ENDS)
    assert torch.equal(states[0], before), "it belongs to the layer still"
    for state, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(state, right.float(), rtol=1e-5, atol=1e-5 * float(right.abs().max()))
        assert state[1:].abs().min() > 0
    assert torch.equal(found[0][0], before[0]) and not found[1][0].any(), "a row that keeps nothing"


@pytest.mark.parametrize("case", ["plain", "mamba"])
def test_what_is_not_known_is_left_to_the_model_files_recurrence(case):
    (call, _), _ = calls(case)
    like = torch.zeros(ROWS, HEADS, KEYS, VALUES)
    function, arguments = call.function, call.arguments

    def may(**changes):
        return replace(call, arguments=arguments | changes).block(None, like) is not None

    assert may() and may(cu_seqlens=None) and may(use_cache=True), "an argument that the function passes over"
    assert not may(cu_seqlens=torch.tensor([0, 7]))
    wide = {
        name: torch.cat([value] * 3, dim=1) if isinstance(value, torch.Tensor) and value.dim() > 2 else value
        for name, value in arguments.items()
    }
    assert replace(call, arguments=wide).block(None, like) is None, "too many tokens"

    def changed(more=None, **given):
        return function(**given)

    assert RecordedCall(call.name, changed, arguments | {"more": 2.0}).block(None, like) is None


@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "nemotron_h"])
@torch.no_grad()
def test_both_ways_of_going_back_leave_the_same(kind, monkeypatch):
    """Real models use the closed form, and without it go the longer way."""
    found = []
    for short in (closed_forms.SHORT, 0):
        monkeypatch.setattr(recording, "SHORT", short)
        seen = []
        monkeypatch.setattr(
            recording,
            "states_after",
            lambda blocks, ends, seen=seen: seen.append(len(blocks)) or states_after(blocks, ends),
        )
        rows = RowModel(hybrids.model(kind), 3, 32)
        tokens = torch.arange(4, 28).view(3, 8)
        rows.feed(tokens[:, :3], [3, 2, 1], keep=0)
        rows.feed(tokens[:, 3:], [5, 4, 5])
        rows.rollback([5, 3, 6])
        rows.cache.settle(rows.lengths, rows.device)
        found.append(hybrids.windows_and_states(rows.cache))
        assert (sum(seen) > 0) == (short > 0)
    for one, other in zip(*found, strict=True):
        for state, right in zip(one, other, strict=True):
            if right is not None:
                torch.testing.assert_close(state, right, rtol=0, atol=1e-5 * float(right.abs().max()))
