"""Rounds whose graphs are replayed, as CUDA graphs are, write the same: nothing of a replay is read after the next one, and keys and
values stay where they were from call to call. On a CPU a backend of the tests' own does what CUDA graphs do.
"""

import functools

import pytest
import torch
from support import tiny
from support.tiny import cache_of
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.engine import loop
from hf_lossy_assist.models.compiled import compilation, static_cache, static_model
from hf_lossy_assist.models.compiled.compilation import Compilation


class Replaying:
    """`moved`: of how many calls keys or values were elsewhere than when the graph was recorded."""

    def __init__(self):
        self.results, self.calls, self.moved = [], 0, 0

    def __call__(self, graph, inputs):
        outputs, places = [], {}

        def replay(*given):
            self.calls += 1
            with torch.inference_mode():  # where tensors of both modes may be written to
                for result in self.results:
                    spoil(result)
            for i, tensor in enumerate(given):
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 4:
                    self.moved += places.setdefault(i, tensor.data_ptr()) != tensor.data_ptr()
            found = graph(*given)
            if not outputs:
                outputs.extend(out.clone() if isinstance(out, torch.Tensor) else out for out in found)
                self.results += [out for out in outputs if isinstance(out, torch.Tensor)]
            for place, out in zip(outputs, found, strict=True):
                if isinstance(out, torch.Tensor):
                    place.copy_(out)
            return outputs

        return replay


def spoil(tensor):
    """Overwrite it as another graph may have done: nothing in it can be used."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(float("nan") if tensor.dtype.is_floating_point else -(10**6))


LENGTHS = (9, 5)
BACKEND = Replaying()  # of all tests, so that each function is traced once


@functools.cache
def pair():
    model = tiny.build("llama", num_hidden_layers=1)
    return hla.enable(model), tiny.noisy(model, 0.05)


@pytest.fixture
def replaying(monkeypatch):
    """The backend, which everything that asks takes for CUDA graphs."""
    monkeypatch.setattr(compilation.Compilation, "replays", lambda self, devices: isinstance(self.backend, Replaying))
    BACKEND.calls = BACKEND.moved = 0
    return BACKEND


def written(backend=None, lengths=LENGTHS, policy="strict", **settings):
    model, draft = pair()
    known = {"max_new_tokens": 16, "do_sample": False, "num_assistant_tokens": 1, "eos_token_id": tiny.NEVER_EMITTED}
    how = {} if backend is None else {"compile_config": CompileConfig(backend=backend)}
    return model.generate(
        **tiny.prompts(lengths), assistant_model=draft, lossy_policy=policy, return_dict_in_generate=True, **known | settings | how,
    )  # fmt: skip


STOP = hla.SVIP(h=0.7, max_draft=4)
CALLS = {
    "whole rounds": {},
    "blocks of a round": {"policy": STOP, "num_assistant_tokens": None, "do_sample": True, "top_k": 0},
    "models alone": {"repetition_penalty": 1.2, "output_logits": True},
}


def drawn(call, lengths):
    """The settings of a call, with random numbers that do not depend on what is drawn beside them."""
    if not call.get("do_sample"):
        return call
    return call | {"generator": [torch.Generator().manual_seed(seed) for seed in range(len(lengths))]}


@pytest.mark.nightly
@pytest.mark.parametrize("call", CALLS)
def test_the_texts_of_many_calls(replaying, monkeypatch, call):
    monkeypatch.setattr("hf_lossy_assist.engine.compiled_loop.DRAFT_CHUNK", 2)  # short drafts are several blocks
    for turn, lengths in enumerate((LENGTHS, (4, 8), LENGTHS)):
        expected = written(lengths=lengths, **drawn(CALLS[call], lengths))
        out = written(replaying, lengths, **drawn(CALLS[call], lengths))
        assert torch.equal(out.sequences, expected.sequences)
        if expected.logits is not None:
            for ours, eager in zip(out.logits, expected.logits, strict=True):
                assert torch.equal(ours.argmax(dim=-1), eager.argmax(dim=-1))
        assert out.speculation.num_compiled_rounds + out.speculation.num_compiled_forwards > 2
        assert turn < 2 or out.speculation.num_graphs == 0
    assert replaying.calls > 10 and replaying.moved == 0


@pytest.mark.full
def test_nothing_of_a_replay_is_left_where_a_later_round_could_read_it(replaying, monkeypatch):
    """A result that somebody still holds keeps CUDA graphs from beginning anew."""
    caches = []
    original = static_model.StaticRowModel.close
    monkeypatch.setattr(static_model.StaticRowModel, "close", lambda self: caches.append(self.cache) or original(self))
    written(replaying)
    held = {id(value) for cache in caches for value in vars(cache).values() if isinstance(value, torch.Tensor)}
    assert len(caches) == 2 and not held


def spoiled(model):
    """All that the model keeps, written over with NaN."""
    tensors = [tensor for _, buffers in static_cache.pool_of(model).free for tensor in buffers.values()]
    with torch.inference_mode():
        for tensor in tensors:
            tensor.fill_(float("nan"))
    return len(tensors)


def test_a_call_never_sees_what_another_one_left(replaying):
    expected = written().sequences
    for _ in range(2):
        assert torch.equal(written(replaying).sequences, expected)
        assert all(spoiled(model) > 0 for model in pair())


@pytest.mark.full
def test_rows_that_leave(replaying):
    """Drafts end behind an end token."""
    settings = {"max_new_tokens": 24, "num_assistant_tokens": 2}
    for end in written(max_new_tokens=8).sequences[1, -4:].tolist():
        expected, out = (written(backend, **settings, eos_token_id=end) for backend in (None, replaying))
        assert torch.equal(out.sequences, expected.sequences)
        assert out.speculation.to_dict(rows=True)["rows"] == expected.speculation.to_dict(rows=True)["rows"]
        for model in pair():
            assert {shape.rows for shape, _ in static_cache.pool_of(model).free} == {1, 2}
            spoiled(model)
    assert replaying.moved == 0


@pytest.mark.full
def test_what_the_caller_is_given_is_his(replaying):
    out = written(replaying, lengths=(9,))
    pooled = {t.data_ptr() for _, buffers in static_cache.pool_of(pair()[0]).free for t in buffers.values()}
    assert pooled and not pooled & {t.data_ptr() for layer in cache_of(out).layers for t in (layer.keys, layer.values)}
    before = [layer.keys.clone() for layer in cache_of(out).layers]
    written(replaying, lengths=(8,))
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, cache_of(out).layers, strict=True))


def interrupted(call):
    raise KeyboardInterrupt


def test_a_call_that_is_interrupted_gives_back(replaying, monkeypatch):
    written(replaying)
    counts = [len(static_cache.pool_of(model).free) for model in pair()]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "drop_finished", interrupted)
        written(replaying)
    assert [len(static_cache.pool_of(model).free) for model in pair()] == counts
    assert torch.equal(written(replaying).sequences, written().sequences) and replaying.moved == 0


def test_eager_calls_keep_nothing(replaying):
    static_cache._pools.clear()
    written()
    assert not static_cache._pools


def test_when_calls_replay_cuda_graphs():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    graphs, options = Compilation(mode="reduce-overhead"), (("triton.cudagraphs", True),)
    without = Compilation(mode="max-autotune", options=(("triton.cudagraphs", False),))
    static, backend = Compilation.requested("static"), Compilation(backend="cudagraphs")
    for how in (static, graphs, Compilation(options=options), backend):
        assert how.replays({cuda}), how
    for how in (Compilation(mode="default"), Compilation(), without, Compilation(backend="aot_eager")):
        assert not how.replays({cuda}), how
    assert not any(graphs.replays(devices) for devices in ({cpu}, {cpu, cuda}, set()))
