"""Rounds that were compiled ahead and found faster run compiled unasked; no others do."""

import functools
from weakref import WeakKeyDictionary

import pytest
import torch
from support import eagle, tiny
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.generation import compile_options
from hf_lossy_assist.generation import warmup as module
from hf_lossy_assist.models.compiled import static_cache


GRAPHS = CompileConfig(backend="eager")


@functools.cache
def pair():
    return hla.enable(tiny.build("llama")), tiny.draft_of(tiny.shared("llama"), "often")


def written(lengths=(9, 5), **settings):
    model, draft = pair()
    known = {"lossy_policy": "strict", "num_assistant_tokens": 3, "do_sample": False, "max_new_tokens": 12}
    settings = known | settings
    return model.generate(**tiny.prompts(lengths), assistant_model=draft, return_dict_in_generate=True, **settings)


@pytest.fixture(autouse=True)
def nothing_ready(monkeypatch):
    monkeypatch.setattr(compile_options, "_warmed_up", WeakKeyDictionary())


@pytest.fixture
def pays(monkeypatch):
    """Compiled rounds are faster, whatever this machine says of graphs that are run eagerly."""
    monkeypatch.setattr(module.WarmUp, "pays", True)


def warm(policy="strict", sizes=(1, 2), **settings):
    settings = {"num_assistant_tokens": 3, "lengths": (64,), "repeats": 1, "compile_config": GRAPHS} | settings
    return hla.warmup(*pair(), policy, sizes, **settings)


@pytest.mark.full
@pytest.mark.nightly(every=2)
@pytest.mark.parametrize("flags", [{}, {"drafts": 4, "mask": 3}], ids=["EAGLE-3", "P-EAGLE"])
def test_drafters_on_hidden_states(pays, flags):
    target = pair()[0]
    make = hla.ParallelEagleDrafter if flags else hla.Eagle3Drafter
    drafter = make(eagle.network(target, target_layers=(0, 1), **flags))
    hla.warmup(target, drafter, "strict", (2,), (64,), num_assistant_tokens=3, repeats=1, compile_config=GRAPHS)
    settings = {"assistant_model": drafter, "lossy_policy": "strict", "num_assistant_tokens": 3, "do_sample": False, "max_new_tokens": 12}  # fmt: skip
    with torch._dynamo.config.patch(error_on_recompile=True):
        out = target.generate(**tiny.prompts((9, 5)), return_dict_in_generate=True, **settings)
    assert out.speculation.num_compiled_rounds > 0 and out.speculation.num_graphs == 0
    assert torch.equal(out.sequences, target.generate(**tiny.prompts((9, 5)), disable_compile=True, **settings))


class Unhashable(hla.SuffixDrafter):
    """A user's drafter without a hash, as of a dataclass with a list."""

    __hash__ = None


@pytest.mark.full
def test_a_drafter_without_a_hash(pays):
    """It was looked up among the warmed-up drafts, once the target had any."""
    warm(sizes=(1,))
    target = pair()[0]
    prompts = tiny.prompts((9,))
    out = target.generate(**prompts, drafter=Unhashable(), lossy_policy="strict", max_new_tokens=6, do_sample=False)
    assert out.equal(target.generate(**prompts, max_new_tokens=6, do_sample=False))


@pytest.mark.full
def test_later_calls_run_compiled_unasked_and_compile_nothing(pays):
    torch._dynamo.reset()  # another test's graphs would serve
    assert written().speculation.num_compiled_rounds == 0
    found = warm()
    assert [(w.rows, w.length) for w in found] == [(1, 64), (2, 64)]
    assert all(w.num_graphs > 0 and w.compile_seconds > 0 and w.eager > 0 and w.compiled > 0 for w in found)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((9, 5), (7,), (3, 30)):
            out = written(lengths)
            assert out.speculation.num_compiled_rounds > 0 and out.speculation.num_graphs == 0
            assert torch.equal(out.sequences, written(lengths, disable_compile=True).sequences)


@pytest.mark.full
@pytest.mark.nightly(every=4)
@pytest.mark.parametrize(
    "settings",
    [
        {"disable_compile": True},
        {"lengths": (9, 5, 4)},
        {"max_new_tokens": 90},
        {"num_assistant_tokens": 4},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.5},
        {"lossy_policy": "block_verification"},
        {"lossy_policy": "svip", "num_assistant_tokens": None},
    ],
)
def test_calls_of_another_kind_run_eagerly(pays, settings):
    warm()
    assert written(**settings).speculation.num_compiled_rounds == 0


@pytest.mark.nightly
def test_stops_that_look_at_each_token_are_compiled_in_all_their_widths(pays):
    stop = hla.SVIP(h=0.7, max_draft=11)
    warm(stop, (2,), num_assistant_tokens=None)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((9, 5), (8, 8), (4, 7)):
            out = written(lengths, lossy_policy=stop, num_assistant_tokens=None, max_new_tokens=40)
            assert out.speculation.num_compiled_rounds > 0 and out.speculation.num_graphs == 0


@pytest.mark.full
@pytest.mark.nightly
def test_texts_as_long_as_their_storage_compile_nothing(pays, monkeypatch):
    """Their last rounds have no room for a whole draft in it."""
    monkeypatch.setattr(static_cache, "LEAST_CAPACITY", 32)
    warm(sizes=(1,), lengths=(32,))
    with torch._dynamo.config.patch(error_on_recompile=True):
        out = written((9,), max_new_tokens=23, eos_token_id=tiny.NEVER_EMITTED)
    assert out.sequences.shape[1] == 32
    assert out.speculation.num_compiled_rounds > 0 and out.speculation.num_graphs == 0


@pytest.mark.full
@pytest.mark.nightly
def test_prompts_are_what_is_measured(pays, monkeypatch):
    """Cut to their ends where they are too long, one after the other where a batch has more rows."""
    seen, original = [], module.WarmingRunner.__call__
    monkeypatch.setattr(
        module.WarmingRunner,
        "__call__",
        lambda self, model, input_ids, *args, **kwargs: (
            seen.append(input_ids.tolist()) or original(self, model, input_ids, *args, **kwargs)
        ),
    )
    long = [token % 90 + 5 for token in range(60)]
    [found] = warm(sizes=(3,), lengths=(64,), prompts=[long, [7, 8, 9]])
    cut = long[-32:]
    assert all(ids == [cut, [0] * 29 + [7, 8, 9], cut] for ids in seen) and len(seen) == 4
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert written((9, 5, 4)).speculation.num_compiled_rounds > 0


@pytest.mark.full
def test_what_is_timed_is_the_calls_and_not_what_is_run_ahead(pays, monkeypatch):
    ran = []
    monkeypatch.setattr(
        module.CompiledRounds,
        "compile_all",
        lambda self, length, original=module.CompiledRounds.compile_all: ran.append(length) or original(self, length),
    )
    warm(sizes=(1, 2), repeats=3)
    assert ran == [64, 64]


@pytest.mark.full
def test_prompts_of_one_token_are_enough(pays):
    [found] = warm(sizes=(1,), lengths=(64,), prompts=[[7]])
    assert found.num_graphs > 0 and found.eager_because is None


@pytest.mark.nightly
def test_where_it_does_not_pay_calls_run_eagerly(monkeypatch):
    monkeypatch.setattr(module.WarmUp, "pays", False)
    warm()
    assert written().speculation.num_compiled_rounds == 0


@pytest.mark.nightly
def test_what_cannot_be_compiled_is_reported(pays):
    [found] = warm(sizes=(1,), repetition_penalty=1.2)
    assert found.eager_because == "a logits processor reads the text"


@pytest.mark.full
def test_random_numbers_are_as_before(pays):
    pair()  # which draws its weights
    torch.manual_seed(5)
    state = torch.get_rng_state()
    warm(sizes=(1,))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.full
def test_calls_that_return_tensors_are_measured(pays):
    assert warm(sizes=(1,), return_dict_in_generate=False)[0].eager > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"sizes": (0,)},
        {"sizes": 2},
        {"sizes": ("two",)},
        {"sizes": ()},
        {"lengths": (0,)},
        {"lengths": "64"},
        {"repeats": 0},
        {"prompts": "64"},
        {"prompts": []},
        {"prompts": [[]]},
        {"prompts": [[5, -1]]},
        {"prompts": [[5, tiny.VOCABULARY]]},
        {"prompts": [["one"]]},
        {"artifacts": 3},
        {"artifacts": "."},
        {"num_return_sequences": 2},
        {"disable_compile": True},
    ],
)
def test_wrong_sizes_are_one_line(wrong):
    with pytest.raises((ValueError, TypeError), match="^warmup: [^\n]*$"):
        warm(**wrong)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"target": "llama"}, "warmup: target: expected a model of Transformers, got 'llama'"),
        ({"draft": "llama"}, "assistant"),
        ({"policy": "nothing"}, "nothing"),
        ({"compile_config": "fast"}, "compile_config: expected a transformers.CompileConfig, got 'fast'"),
    ],
)
def test_what_generate_refuses_is_refused(wrong, line):
    target, draft = pair()
    given = {"target": target, "draft": draft, "policy": "strict"} | wrong
    with pytest.raises((ValueError, TypeError), match=f"^[^\n]*{line}[^\n]*$"):
        hla.warmup(**given)
