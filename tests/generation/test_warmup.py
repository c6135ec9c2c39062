"""Rounds that are compiled ahead: later calls that request compilation compile nothing more; others run eagerly."""

import functools

import pytest
import torch
from support import eagle, tiny
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.models.compiled import compilation, static_cache, static_model


pytestmark = pytest.mark.full
GRAPHS = CompileConfig(backend="eager")


@functools.cache
def pair():
    return hla.enable(tiny.build("llama")), tiny.draft_of(tiny.shared("llama"), "often")


def written(lengths=(9, 5), draft=None, **settings):
    known = {"lossy_policy": "strict", "num_assistant_tokens": 3, "do_sample": False, "max_new_tokens": 12}
    known |= {"compile_config": GRAPHS, "return_dict_in_generate": True, "assistant_model": draft or pair()[1]}
    return pair()[0].generate(**tiny.prompts(lengths), **known | settings)


def warm(policy="strict", sizes=(1, 2), draft=None, **settings):
    settings = {"num_assistant_tokens": 3, "lengths": (64,), "compile_config": GRAPHS} | settings
    return hla.warmup(pair()[0], draft or pair()[1], policy, sizes, **settings)


def compiles_nothing(lengths, **settings):
    with torch._dynamo.config.patch(error_on_recompile=True):
        out = written(lengths, **settings)
    assert out.speculation.num_compiled_rounds > 0 and out.speculation.num_graphs == 0
    assert torch.equal(out.sequences, written(lengths, **settings | {"disable_compile": True}).sequences)
    return out


def test_later_calls_compile_nothing():
    """Nor those of a batch whose rows end one after the other; calls that request nothing run eagerly."""
    torch._dynamo.reset()  # another test's graphs would serve
    ends = {"eos_token_id": list(range(4, 40)), "pad_token_id": 0}
    done = warm(sizes=(2,), **ends)
    assert [len(report.rows) for report in done] == [1, 2]
    assert all(report.num_graphs > 0 and report.eager_because is None for report in done)
    for lengths in ((9, 5), (7,)):
        compiles_nothing(lengths, **ends)
    assert written(compile_config=None).speculation.num_compiled_rounds == 0
    drafter = hla.Eagle3Drafter(eagle.network(pair()[0], target_layers=(0, 1)))  # on hidden states
    warm(sizes=(1,), draft=drafter)
    compiles_nothing((7,), draft=drafter)


def test_longer_texts_are_not_more_graphs():
    torch._dynamo.reset()
    graphs = []
    for length in (64, 700):
        pair.cache_clear()
        graphs.append(warm(sizes=(1,), lengths=(length,))[0].num_graphs)
        compiles_nothing((7,)), compiles_nothing((length - 20,))
    assert graphs[0] == graphs[1] > 0
    pair.cache_clear()


@pytest.mark.nightly
def test_stops_that_look_at_each_token_are_compiled_in_all_their_widths():
    stop = hla.SVIP(h=0.7, max_draft=11)
    warm(stop, (2,), num_assistant_tokens=None)
    for lengths in ((9, 5), (8, 8), (4, 7)):
        compiles_nothing(lengths, lossy_policy=stop, num_assistant_tokens=None, max_new_tokens=40)


@pytest.mark.nightly
def test_texts_as_long_as_their_storage_compile_nothing(monkeypatch):
    """Their last rounds have no room for a whole draft in it."""
    monkeypatch.setattr(static_cache, "LEAST_CAPACITY", 32)
    warm(sizes=(1,), lengths=(32,))
    out = compiles_nothing((9,), max_new_tokens=23, eos_token_id=tiny.NEVER_EMITTED)
    assert out.sequences.shape[1] == 32


def test_random_numbers_are_as_before_and_what_cannot_be_compiled_is_reported():
    pair()  # which draws its weights
    torch.manual_seed(5)
    state = torch.get_rng_state()
    [done] = warm(sizes=(1,), do_sample=True, repetition_penalty=1.2)
    assert torch.equal(torch.get_rng_state(), state) and done.eager_because == "a logits processor reads the text"


def test_what_generate_refuses_is_refused():
    given = dict(zip(("target", "draft"), pair(), strict=True)) | {"policy": "strict"}
    for wrong in ({"draft": "llama"}, {"policy": "nothing"}, {"compile_config": "fast"}):
        line = "^[^\n]*(assistant|nothing|compile_config: expected)[^\n]*$"
        with pytest.raises((ValueError, TypeError), match=line):
            hla.warmup(**given | wrong)


@torch.no_grad()
def test_a_slice_of_a_longer_text_is_not_another_graph():
    for text, graphs in ((torch.ones(1, 20, dtype=torch.long), 1), (torch.ones(1, 30, dtype=torch.long), 0)):
        model = static_model.StaticRowModel(pair()[0], 1, 64, compilation=compilation.Compilation("eager"))
        model.feed(text[:, :9], [9]), model.feed(text[:, 9:10], [1])
        assert model.num_graphs == graphs
