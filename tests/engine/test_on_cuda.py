"""Compiled rounds on a GPU, as CUDA graphs where their mode has them: texts as of eager rounds, nothing compiled or recorded again."""

import functools

import pytest
import torch
from support import tiny
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.models.compiled import static_cache


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MODES = ("default", "reduce-overhead")
CALLS = {
    "strict": {"num_assistant_tokens": 3},
    "svip": {"lossy_policy": hla.SVIP(h=0.7, max_draft=8)},
    "sampling": {"num_assistant_tokens": 3, "do_sample": True, "top_k": 0},
    "models alone": {"num_assistant_tokens": 3, "repetition_penalty": 1.2},
}


@functools.cache
def pair():
    """Deep copies: other tests have these models on a CPU."""
    target, draft = tiny.build("llama"), tiny.draft_of(tiny.build("llama"), "often")
    return hla.enable(target.cuda()), draft.cuda()


def written(lengths=(9, 5), mode=None, **settings):
    model, draft = pair()
    known = {"lossy_policy": "strict", "max_new_tokens": 40, "do_sample": False, "eos_token_id": tiny.NEVER_EMITTED}
    how = {} if mode is None else {"compile_config": CompileConfig(mode=mode)}
    if settings.get("do_sample"):
        how["generator"] = [torch.Generator("cuda").manual_seed(seed) for seed in range(len(lengths))]
    prompts = {name: x.cuda() for name, x in tiny.prompts(lengths).items()}
    return model.generate(**prompts, assistant_model=draft, return_dict_in_generate=True, **known | settings | how)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_compiled_rounds_write_what_eager_ones_write(call, mode):
    expected = written(**CALLS[call])
    for turn in range(4):
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            out = written(mode=mode, **CALLS[call])
        assert torch.equal(out.sequences, expected.sequences)
        assert out.speculation.num_compiled_rounds + out.speculation.num_compiled_forwards > 2
        assert turn == 0 or out.speculation.num_graphs == 0
    shorter = written(lengths=(6, 8), mode=mode, **CALLS[call])
    assert torch.equal(shorter.sequences, written(lengths=(6, 8), **CALLS[call]).sequences)


def test_graphs_are_recorded_once():
    """Keys and values stay where they are, so that calls replay what the first ones recorded."""
    from torch._inductor.cudagraph_trees import get_container

    recorded = []
    for _ in range(5):
        written(mode="reduce-overhead", num_assistant_tokens=3)
        recorded.append(get_container(torch.cuda.current_device()).tree_manager.new_graph_id().id)
    assert recorded[-1] - recorded[-2] == 1  # the id that was just asked for
    assert all(static_cache.pool_of(model).free for model in pair())


def test_rows_that_leave():
    settings = {"lengths": (9, 4, 6, 7), "num_assistant_tokens": 3, "max_new_tokens": 60, "eos_token_id": tiny.EOS}
    expected = written(**settings)
    for _ in range(3):
        assert torch.equal(written(mode="reduce-overhead", **settings).sequences, expected.sequences)
