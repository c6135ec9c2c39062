"""Compiled rounds of drafters on hidden states draft, accept and write what eager ones do: the target's states are outputs of its graph.

Ragged rows, as eager rounds draft nothing in the first round of rows of one length, which have no forward of their own for their prompts.
"""

import functools
import shutil
import warnings

import pytest
import torch
from support import eagle, tiny
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.networks.base import CAUSAL, AttentionWindow
from hf_lossy_assist.drafters.trained import DFlash2Drafter, DFlashDrafter, DSparkDrafter
from hf_lossy_assist.engine import compiled_loop, loop
from hf_lossy_assist.models.compiled import static_cache


pytestmark = pytest.mark.full
GRAPHS = CompileConfig(backend="eager")
LENGTHS = (9, 4)
LAYERS = (0, 1)  # whose states are read, of two blocks
STRICT = hla.LossyPolicy(stop=hla.Constant(2))
LOSSY = hla.LossyPolicy(hla.TopK(40), hla.Constant(2))  # rounds accept a part


@functools.cache
def target():
    return hla.enable(tiny.build("llama"))


@functools.cache
def drafter(kind):
    if kind == "eagle3":
        return eagle.trained(target(), tiny.prompts(LENGTHS), tiny.NEW, draft_vocabulary=70, layers=LAYERS)
    if kind == "eagle3 of two layers":
        return eagle.drafter(target(), layers=2, draft_vocabulary=None, target_layers=LAYERS, norm_output=True)
    if kind == "eagle3 with windows":
        sights = (AttentionWindow(2, causal=True), CAUSAL)
        return eagle.drafter(target(), layers=2, target_layers=LAYERS, sights=sights)
    flags = {} if kind == "dflash" else {"from_anchor": True, "draft_vocabulary": 60}
    if kind == "dflash with windows":
        flags = {"layers": 2, "sights": (AttentionWindow(2, causal=True), AttentionWindow(3, moves=True))}
    if kind == "dflash 2":
        flags = {"layers": 2, "group": 8, "rank": 4, "candidates": 5}
    if kind.startswith("dspark"):
        flags |= {"rank": 4, "markov": kind.removeprefix("dspark ")}
    make = DFlash2Drafter if kind == "dflash 2" else DSparkDrafter if kind.startswith("dspark") else DFlashDrafter
    return make(eagle.dflash_network(target(), target_layers=LAYERS, **flags))


def written(kind, policy, lengths=LENGTHS, **settings):
    given = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": tiny.NEVER_EMITTED} | settings
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*this policy is lossy")
        return target().generate(
            **tiny.prompts(lengths), assistant_model=drafter(kind), lossy_policy=policy, return_dict_in_generate=True, **given
        )  # fmt: skip


def compared(*args, generators=lambda: None, **settings):
    """The compiled call, after a look at whether it has drafted and accepted what the eager one has."""
    eager = written(*args, generator=generators(), **settings)
    out = written(*args, generator=generators(), **{"compile_config": GRAPHS} | settings)
    assert torch.equal(out.sequences, eager.sequences)
    one, other = (run.speculation.to_dict(rows=True, sources=True) for run in (eager, out))
    for key in ("num_draft_tokens", "num_accepted_draft_tokens", "num_lossy_accepts", "rows"):
        assert one[key] == other[key], key
    return out


@pytest.fixture(scope="module", autouse=True)
def graphs_are_freed():
    yield
    torch._dynamo.reset()


@pytest.fixture
def all_rows_stay(monkeypatch):
    """Or a text that ends before another would have each function traced again, for one row."""
    monkeypatch.setattr(loop, "drop_finished", lambda call: None)


KINDS = [
    "eagle3", "dflash", "dspark vanilla", "eagle3 of two layers", "dflash from the anchor", "eagle3 with windows", "dflash with windows",
    "dspark gated", "dspark rnn", "dflash 2",
]  # fmt: skip


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[1:])])
def test_rounds_of_a_constant_length(all_rows_stay, kind):
    out = compared(kind, LOSSY)
    assert out.speculation.eager_because is None and out.speculation.num_compiled_rounds > 4
    assert len({count for row in out.speculation.rows for _, count in row.steps}) > 2


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_rounds_of_a_stop_that_looks(kind):
    out = compared(kind, hla.SVIP(h=0.6, max_draft=6))
    assert out.speculation.eager_because is None and out.speculation.num_compiled_rounds > 4
    expected = tiny.greedy(target(), tiny.prompts(LENGTHS), max_new_tokens=20, eos_token_id=tiny.NEVER_EMITTED)
    assert torch.equal(out.sequences, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_samples(kind):
    """`top_k` leaves a drafter of fewer tokens none at some places: any guess will do there, the same one."""
    seeds = lambda: [torch.Generator().manual_seed(seed) for seed in (5, 6)]  # noqa: E731
    out = compared(kind, STRICT, generators=seeds, do_sample=True, top_k=8)
    assert out.speculation.num_compiled_rounds > 4


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_rows_that_end_and_texts_of_one_token(kind):
    """A prompt of one token has no states to draft from: its first round runs eagerly."""
    whole = tiny.greedy(target(), tiny.prompts((9, 1)), max_new_tokens=20, eos_token_id=tiny.NEVER_EMITTED)
    end = tiny.some_eos(whole, 9)
    out = compared(kind, STRICT, (9, 1), eos_token_id=end)
    assert len({row.num_new_tokens for row in out.speculation.rows}) > 1
    assert 0 < out.speculation.num_compiled_rounds < max(row.num_spec_steps for row in out.speculation.rows)


@pytest.mark.parametrize("kind", ["dflash", pytest.param("eagle3", marks=pytest.mark.nightly)])
def test_eager_rounds_among_them(all_rows_stay, monkeypatch, kind):
    """Each goes on where the other has been."""
    fits, rounds = compiled_loop.CompiledRounds.fits, []
    monkeypatch.setattr(
        compiled_loop.CompiledRounds, "fits", lambda self, limits: rounds.append(1) or (len(rounds) % 3 == 0 and fits(self, limits))
    )  # fmt: skip
    out = compared(kind, LOSSY)
    assert 1 < out.speculation.num_compiled_rounds <= len(rounds) // 3


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_text_that_outgrows_its_storage(monkeypatch, kind):
    monkeypatch.setattr(static_cache, "LEAST_CAPACITY", 16)
    assert compared(kind, STRICT, (9, 4)).speculation.num_compiled_rounds > 4


def test_what_is_no_output_of_the_target():
    """The last block's states before the norm are no output of the target: rounds run eagerly."""
    model = hla.enable(tiny.build("llama"))
    out = tiny.assisted(model, tiny.prompts(LENGTHS), eagle.drafter(model), "strict", compile_config=GRAPHS)
    assert out.speculation.eager_because == "the drafter reads a hidden state that is no output of the target"
    assert out.sequences.equal(tiny.greedy(model, tiny.prompts(LENGTHS)))


@pytest.mark.nightly
def test_other_calls_of_the_target_use_the_graphs_that_they_had():
    """Hooks that Transformers puts on a model for its hidden states count as no change of it."""
    model = hla.enable(tiny.build("llama", num_hidden_layers=1))
    draft = tiny.noisy(model, 0.05)
    made = eagle.drafter(model, target_layers=(0,))
    settings = {"compile_config": GRAPHS, "num_assistant_tokens": 1}
    calls = [tiny.assisted(model, tiny.prompts((9, 4)), given, "strict", **settings) for given in (draft, made) * 2]
    graphs = [out.speculation.num_graphs for out in calls]
    assert min(graphs[:2]) > 0 and graphs[2:] == [0, 0]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_inductor_writes_the_same(kind):
    out = compared(kind, STRICT, (9,), max_new_tokens=12, compile_config=CompileConfig())
    assert out.speculation.num_compiled_rounds > 4 and out.speculation.eager_because is None
