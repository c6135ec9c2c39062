"""Compiled rounds write what rounds that run stage by stage write; what cannot be compiled says why and runs eagerly.

The compiler's front end traces every function here, and its graphs run as they are (`backend="eager"`), of two architectures as PyTorch's
autograd sees them (`"aot_eager"`): what inductor makes of them is the benchmark's business, and one smoke test's.
"""

import functools
import re
import shutil
import warnings
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from support import tiny
from support.paper_rules import Ensemble, SyntheticForBenchmarks
from support.tiny import cache_of
from torch.ao.quantization import quantize_dynamic
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.engine import compiled_loop, loop
from hf_lossy_assist.models.compiled import compilation
from hf_lossy_assist.models.facts import CACHE
from hf_lossy_assist.models.packed_linears import int8
from hf_lossy_assist.stops import joint_goodput


GRAPHS = CompileConfig(backend="eager")
AS_AUTOGRAD_SEES_THEM = {"llama", "gpt2"}  # rotary, learned positions: this backend takes three times as long
RAGGED = (9, 4, 6, 7)


@functools.cache
def pair(name="llama"):
    """`name`: of an architecture, or "one layer" of Llama, which is traced in half the time."""
    if name == "one layer":
        model = tiny.build("llama", num_hidden_layers=1)
        return hla.enable(model), tiny.noisy(model, 0.05)
    return hla.enable(tiny.build(name)), tiny.draft_of(tiny.shared(name), "often")


def written(name="llama", policy="strict", lengths=RAGGED, **settings):
    """The whole output, compiled."""
    model, draft = pair(name)
    settings = {"max_new_tokens": tiny.NEW, "do_sample": False, "num_assistant_tokens": 4} | settings
    if "drafter" not in settings:
        settings.setdefault("assistant_model", draft)
    settings = {"compile_config": GRAPHS, "return_dict_in_generate": True} | settings
    return model.generate(**tiny.prompts(lengths), lossy_policy=policy, **settings)


def stage_by_stage(*args, **settings):
    return written(*args, compile_config=None, **settings)


COUNTS = ("num_lossy_accepts", "num_accepted_draft_tokens", "num_draft_tokens", "acceptance_histogram")
COUNTS += ("acceptance_histogram_by_draft_length", "rows")


def decides_the_same(name, policy, lengths, **settings):
    """Compare texts and counts of eager and compiled rounds, each row with a generator; return the compiled call's statistics."""
    runs = []
    for call in (stage_by_stage, written):
        generator = [torch.Generator().manual_seed(5 + row) for row in range(len(lengths))]
        runs.append(call(name, policy, lengths, generator=generator, num_assistant_tokens=None, **settings))
    assert torch.equal(runs[0].sequences, runs[1].sequences) and runs[1].speculation.num_compiled_rounds > 1
    ours, expected = (run.speculation.to_dict(rows=True, sources=True) for run in runs)
    for key in COUNTS:
        assert ours[key] == expected[key], key
    return runs[1].speculation


@pytest.fixture(scope="module", autouse=True)
def graphs_are_freed():
    """They would stay with the process as long as it runs: gigabytes."""
    yield
    torch._dynamo.reset()


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(tiny.BATCHED))
def test_every_tested_architecture_writes_what_generate_writes(name):
    """Every row to its full length: a graph for each number of rows would be compiled otherwise."""
    full = {"eos_token_id": tiny.NEVER_EMITTED}
    backend = CompileConfig(backend="aot_eager") if name in AS_AUTOGRAD_SEES_THEM else GRAPHS
    out = written(name, compile_config=backend, num_assistant_tokens=2, **full)
    assert torch.equal(out.sequences, tiny.greedy(tiny.shared(name), tiny.prompts(RAGGED), **full))
    assert out.speculation.num_compiled_rounds > 2 and out.speculation.eager_because is None


RULES = [
    hla.Strict(), hla.BlockVerification(), hla.Lenience(0.3), hla.Typical(0.09, 0.3), hla.TopK(3), hla.TopKTolerance(5, 4.0),
    Ensemble(0.5), hla.EntropyVerify(), hla.Thresholds(0.2, 0.5), SyntheticForBenchmarks(0.7), hla.Union((hla.TopK(2), hla.Typical())),
    hla.OwnRule(lambda dists: dists.px > 0.2 * dists.top),
]  # fmt: skip


MODES = [(rule, mode) for mode in ("sampling", "greedy") for rule in RULES if mode in rule.modes]


@pytest.mark.full
@pytest.mark.nightly(every=len(MODES))
@pytest.mark.parametrize(("rule", "mode"), MODES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
@pytest.mark.filterwarnings("ignore:.*policy is lossy")
def test_every_rule_of_tensors_decides_the_same(monkeypatch, rule, mode):
    """Each row has random numbers of its own, which do not depend on how many the other rows draw, and Transformers' warpers.

    A stop that never stops: the drafts of all rules are one graph then, and only what verifies and accepts is traced for each.
    """
    monkeypatch.setattr(loop, "drop_finished", lambda call: None)  # or a graph would be traced for each number of rows
    policy = hla.LossyPolicy(rule=rule, stop=hla.Confidence(0.0, max_draft=2))
    warpers = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9} if mode == "sampling" else {}
    decides_the_same("one layer", policy, (9, 5), max_new_tokens=16, **warpers)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stop", "sampling"), [(hla.SVIP(h=0.7, max_draft=7), True), (hla.Confidence(0.3, max_draft=6), False)]
)
def test_stops_that_look_at_each_token_decide_the_same(stop, sampling):
    settings = {"do_sample": sampling, "max_new_tokens": 24, "eos_token_id": tiny.NEVER_EMITTED}
    found = decides_the_same("llama", hla.LossyPolicy(stop=stop), RAGGED, **settings)
    assert found.eager_because is None
    assert len(found.to_dict()["acceptance_histogram_by_draft_length"]) > 2  # drafts of several lengths


@pytest.mark.full
@pytest.mark.parametrize(("step", "lengths"), [(0.05, {2, 4}), pytest.param(9.0, {2}, marks=pytest.mark.nightly)])
def test_a_joint_stop_decides_behind_each_block(monkeypatch, step, lengths):
    """The tokens of a block are drafted and verified in any case, so that all of them count, up to the limit."""
    monkeypatch.setattr(compiled_loop, "DRAFT_CHUNK", 2)
    settings = {"num_assistant_tokens": None, "max_new_tokens": 30, "eos_token_id": tiny.NEVER_EMITTED}
    out = written("one layer", hla.LossyPolicy(stop=hla.JointGoodput(step=step, max_draft=5)), **settings)
    assert torch.equal(out.sequences, stage_by_stage("one layer", **settings).sequences)
    assert out.speculation.num_compiled_rounds > 2 and out.speculation.eager_because is None
    drafted = out.speculation.to_dict()["acceptance_histogram_by_draft_length"]
    rounds = {int(length): sum(counts) for length, counts in drafted.items()}
    others = sum(count for length, count in rounds.items() if length not in lengths)
    # The first round is not compiled, the last ones have no room, and a row that is alone has SVIP.
    assert rounds.keys() >= lengths and 2 * others < sum(rounds.values()), rounds


@pytest.mark.full
@pytest.mark.nightly
def test_a_joint_stop_measures_compiled_rounds():
    """Not those that were compiled; with one row it is SVIP."""
    model, draft = pair("one layer")
    joint_goodput.KNOWN.pop(model, None)
    known = {"max_new_tokens": 30, "eos_token_id": tiny.NEVER_EMITTED}
    settings = known | {"num_assistant_tokens": None, "lengths": (9, 5)}
    policy = hla.LossyPolicy(stop=hla.JointGoodput(max_draft=7))
    out, again = (written("one layer", policy, **settings) for _ in range(2))
    assert torch.equal(out.sequences, again.sequences)
    assert torch.equal(out.sequences, tiny.greedy(model, tiny.prompts((9, 5)), **known))
    assert again.speculation.num_compiled_rounds > 2 and again.speculation.eager_because is None
    (known,) = joint_goodput.KNOWN[model][draft].values()
    seconds = [second for each in known.costs.steps.points.values() for second in each]
    assert known.costs.ready and known.averages[0] > 2 and max(seconds) < 2


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["strict", "svip"])
def test_rounds_upload_nothing_while_no_row_ends(monkeypatch, policy):
    """On a GPU each tensor that the host makes is a copy, and each look at the device waits for it."""
    made, looked = [], []
    tensor, seen = torch.tensor, []
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: made.append(args) or tensor(*args, **kwargs))
    for name in ("tolist", "__bool__", "item", "__int__"):
        look = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, look=look: looked.append(look) or look(self))
    run_round = compiled_loop.CompiledRounds.run

    def counted(self, limits, stats):
        before, drafted = (len(made), len(looked)), self.call.clock.forwards["draft"]
        ran = run_round(self, limits, stats)
        seen.append((len(made) - before[0], len(looked) - before[1], self.call.clock.forwards["draft"] - drafted))
        return ran

    monkeypatch.setattr(compiled_loop.CompiledRounds, "run", counted)
    settings = {"policy": policy, "max_new_tokens": 60, "eos_token_id": tiny.NEVER_EMITTED}
    settings |= {"num_assistant_tokens": None} if policy == "svip" else {}
    written(**settings)  # compiles
    seen.clear()
    written(**settings)
    between = seen[1:6]  # the first round uploads where the rows stand, the last ones draft less
    assert [uploads for uploads, _, _ in between] == [0] * 5
    assert all(looks <= 1 + drafted // 4 for _, looks, drafted in between)


@pytest.mark.nightly
def test_what_a_model_is_made_of_is_not_checked_before_each_round(monkeypatch):
    """A pair of small models has thousands of such checks, a fifth of a round."""
    original, seen = compilation.worth_checking, {True: [], False: []}

    def watched(guards, models):
        checked = original(guards, models)
        for guard, worth in zip(guards, checked, strict=True):
            seen[worth].append(guard.name)
        return checked

    monkeypatch.setattr(compilation, "worth_checking", watched)
    monkeypatch.setattr(compilation, "_functions", WeakKeyDictionary())
    written(lengths=(9,), num_assistant_tokens=1)
    assert len(seen[False]) > 500 and len(seen[True]) < 200
    assert {"plan.gamma", "state.last", "target.cache.layers[0].keys"} <= set(seen[True])


@pytest.mark.nightly
def test_prompts_of_any_length_compile_nothing():
    written(lengths=(9, 4))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths, new in (((5, 8), 10), ((3, 3), tiny.NEW), ((7, 12), 30), ((30, 2), 20)):
            out = written(lengths=lengths, max_new_tokens=new)
            assert out.speculation.num_graphs == 0
            assert torch.equal(out.sequences, stage_by_stage(lengths=lengths, max_new_tokens=new).sequences)


@pytest.mark.full
def test_what_a_round_of_tensors_cannot_do_runs_stage_by_stage():
    remembers = hla.LossyPolicy(stop=hla.AnyOf([hla.SVIP(max_draft=1), hla.Heuristic(1)]))
    cases = (
        ({"policy": remembers, "num_assistant_tokens": None}, "the stop remembers"),
        ({"repetition_penalty": 1.2}, "reads the text"),
        ({"output_scores": True}, "scores or logits are kept"),
        ({"output_logits": True}, "scores or logits are kept"),
        ({"policy": hla.LossyPolicy(rule=hla.Limited(hla.TopK(3), per_request=2))}, "keeps a state"),
        ({"drafter": hla.SuffixDrafter()}, "what drafts is no model"),
    )
    how = {"lengths": (9,), "max_new_tokens": 8, "num_assistant_tokens": 1, "eos_token_id": tiny.NEVER_EMITTED}
    for settings, reason in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out, alone = (call("one layer", **how | settings) for call in (written, stage_by_stage))
        assert torch.equal(out.sequences, alone.sequences)
        assert reason in out.speculation.eager_because and out.speculation.num_compiled_rounds == 0


@pytest.mark.nightly
def test_models_of_many_layers_are_compiled_block_by_block(monkeypatch):
    monkeypatch.setattr(compiled_loop, "MOST_LAYERS", 3)
    out = written()
    assert torch.equal(out.sequences, stage_by_stage().sequences)
    assert re.search(r"graphs of \d+ layers, more than 3", out.speculation.eager_because)
    assert out.speculation.num_compiled_rounds == 0 and out.speculation.num_compiled_forwards > 2


def broken(graph, inputs):
    raise RuntimeError("no way\nno how")


@pytest.mark.nightly
def test_a_compiler_that_fails_costs_a_line_and_no_text():
    says = r"torch.compile could not compile it .*: what was to be compiled runs eagerly"
    with pytest.warns(UserWarning, match=says):
        out = written(compile_config=CompileConfig(backend=broken))
    assert torch.equal(out.sequences, stage_by_stage().sequences)
    assert out.speculation.num_compiled_rounds == 0


@pytest.mark.full
@pytest.mark.nightly
def test_a_rule_that_dynamo_cannot_guard_runs_eagerly():
    limit = np.array([0.1])
    policy = hla.LossyPolicy(rule=hla.OwnRule(lambda dists: dists.px > float(limit[0])))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = written(policy=policy, lengths=(9,))
    assert torch.equal(out.sequences, stage_by_stage(policy=policy, lengths=(9,)).sequences)
    assert out.speculation.num_compiled_rounds > 0 or any("runs eagerly" in str(w.message) for w in caught)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_dynamic_int8_is_not_tried(recwarn):
    """PyTorch packs its weights into an object that dynamo cannot trace: it would fail anew at every call."""
    model, draft = pair("llama")
    draft = quantize_dynamic(tiny.noisy(tiny.build("llama").float(), 0.05), {torch.nn.Linear}, dtype=torch.qint8)
    found = [written(assistant_model=draft, lengths=(9,)) for _ in range(2)]
    expected = tiny.greedy(model, tiny.prompts((9,)))
    assert all(torch.equal(out.sequences, expected) for out in found)
    assert "packed by PyTorch's own quantisation" in found[1].speculation.eager_because
    assert found[1].speculation.num_compiled_forwards > 0, "the target's blocks still are"
    assert not [str(warning.message) for warning in recwarn if "could not compile" in str(warning.message)]


@pytest.mark.nightly
def test_this_packages_int8_is_compiled():
    model = tiny.build("llama", num_hidden_layers=1)
    target, draft = int8(model), int8(tiny.noisy(model, 0.05))
    alone = tiny.greedy(target, tiny.prompts(RAGGED), eos_token_id=tiny.NEVER_EMITTED)
    settings = {"num_assistant_tokens": 2, "eos_token_id": tiny.NEVER_EMITTED, "compile_config": GRAPHS}
    out = tiny.assisted(hla.enable(target), tiny.prompts(RAGGED), draft, **settings)
    assert torch.equal(out.sequences, alone)
    assert out.speculation.num_compiled_rounds > 2 and out.speculation.eager_because is None


@pytest.mark.nightly
def test_an_interrupted_compilation_leaves_nothing_behind(monkeypatch):
    """The next call compiles what was not, and writes the same."""
    impatient = [True]

    def backend(graph, inputs):
        if impatient:
            impatient.clear()
            raise KeyboardInterrupt
        return graph

    monkeypatch.setattr(compilation, "_functions", WeakKeyDictionary())
    settings = {"compile_config": CompileConfig(backend=backend), "lengths": (9,), "num_assistant_tokens": 1}
    pair()  # which draws its weights
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        written(**settings)
    assert torch.equal(torch.get_rng_state(), state) and not torch.is_inference_mode_enabled()
    out = written(**settings)
    assert torch.equal(out.sequences, stage_by_stage(lengths=(9,), num_assistant_tokens=1).sequences)
    assert out.speculation.num_compiled_rounds > 2 and out.speculation.eager_because is None
    assert out.speculation.num_graphs == 1


@pytest.mark.nightly
def test_static_caches_are_chosen_by_name(monkeypatch):
    monkeypatch.setattr("hf_lossy_assist.models.compiled.compilation.CompileConfig", lambda: GRAPHS)
    out = written(compile_config=None, cache_implementation="static")
    assert out.speculation.num_compiled_rounds > 2


@pytest.mark.full
def test_a_cache_goes_on_with_transformers():
    model, _ = pair("one layer")
    out = written("one layer", lengths=(9,), max_new_tokens=10, num_assistant_tokens=1)
    more = model.generate(out.sequences, **{CACHE: cache_of(out)}, max_new_tokens=6, do_sample=False)
    assert torch.equal(more, model.generate(out.sequences, max_new_tokens=6, do_sample=False))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_writes_the_same_and_its_kernels_are_reused(tmp_path):
    model, draft = pair("one layer")
    settings = {"name": "one layer", "num_assistant_tokens": 1, "max_new_tokens": 8, "lengths": (9,)}
    warm = {"batch_sizes": [1], "lengths": [64], "num_assistant_tokens": 1, "artifacts": tmp_path / "rounds"}
    found = hla.warmup(model, draft, **warm)
    assert found[0].num_graphs == 1 and found[0].eager_because is None
    out = written(compile_config=CompileConfig(), **settings)
    assert torch.equal(out.sequences, stage_by_stage(**settings).sequences)
    assert out.speculation.num_compiled_rounds > 1 and out.speculation.num_graphs == 0
    assert (tmp_path / "rounds").stat().st_size > 1000


def test_what_was_compiled_for_a_draft_goes_with_it(monkeypatch):
    monkeypatch.setattr(compilation, "_functions", functions := WeakKeyDictionary())
    monkeypatch.setattr(compilation, "compiled", lambda *args: object())
    monkeypatch.setattr(compilation, "shared", lambda signatures: ())
    target, of = torch.nn.Linear(1, 1), SimpleNamespace(key=0)
    for draft in (torch.nn.Linear(1, 1) for _ in range(5)):
        found = compilation.compiled_once(max, None, [(target, of), (draft, of)])
        assert found is compilation.compiled_once(max, None, [(target, of), (draft, of)])
        assert len(functions[target]) <= 2
