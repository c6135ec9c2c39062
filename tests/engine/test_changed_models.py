"""Compiled rounds behind a change of a model: they write what eager ones write of the model as it is now, or run eagerly and say so."""

import copy
import warnings

import pytest
import torch
from support import tiny
from support.changes import CHANGES, SAME_TEXT, change
from transformers import AttentionInterface, CompileConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

import hf_lossy_assist as hla
from hf_lossy_assist.models.compiled.compilation import Signature, shared
from hf_lossy_assist.models.packed_linears import PackedLinear


EAGER = CompileConfig(backend="eager")


@pytest.fixture(autouse=True)
def graphs_are_freed():
    yield
    torch._dynamo.reset()


def pair(layers=1):
    model = tiny.build("llama", eos_token_id=tiny.NEVER_EMITTED, num_hidden_layers=layers)
    return hla.enable(model), tiny.noisy(tiny.build("llama", num_hidden_layers=layers), 0.05)


def written(target, draft, rows, **how):
    """The text, and how much of it was drafted and accepted; with the whole report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how = {"max_new_tokens": 14, "num_assistant_tokens": 1} | how
        out = tiny.assisted(target, tiny.prompts((9, 4, 6, 7)[:rows]), draft, **how)
    counts = [(row.num_draft_tokens, row.num_accepted_draft_tokens) for row in out.speculation.rows]
    return (out.sequences.tolist(), counts), out.speculation


def compare(models, rows, how=EAGER):
    """Compiled against eager; returns what both wrote, and why the compiled call ran eagerly, if it did."""
    found, report = written(*models, rows, compile_config=how)
    eager, _ = written(*models, rows)
    assert found == eager
    assert report.num_compiled_rounds or report.eager_because
    return found, report.eager_because


@pytest.fixture
def restored():
    """Changes of classes and tables are undone."""
    forward = modeling_llama.LlamaMLP.forward
    yield
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    modeling_llama.LlamaMLP.forward = forward


@pytest.mark.full
@pytest.mark.nightly(every=len(CHANGES))
@pytest.mark.parametrize("name", CHANGES)
def test_rounds_behind_a_change(name, restored):
    """Both target and draft change: a stale target would write another text, a stale draft have another number of tokens accepted."""
    models, rows = pair(2 if "layer" in name else 1), 1 + 3 * (list(CHANGES).index(name) % 2)
    before, reason = compare(models, rows)
    assert reason is None
    changes = [change(name, model) for model in models]
    found, _ = compare(models, rows)
    assert name in SAME_TEXT or found != before, "the change shows nothing"
    if changes[0] is not None:
        for change_again in reversed(changes):
            change_again()
        again, _ = compare(models, rows)
        assert again != found, "the second change shows nothing"


@pytest.mark.full
@pytest.mark.nightly
def test_two_models_in_turns_and_each_changed():
    (one, draft), other = pair(), hla.enable(tiny.build("llama", 5, eos_token_id=tiny.NEVER_EMITTED))
    for turn in range(2):
        texts = [compare((model, draft), 1)[0] for model in (one, other)]
        assert texts[0] != texts[1]
        change("closure", (one, other)[turn])


@pytest.mark.nightly
def test_a_change_put_back_compiles_nothing():
    models = pair()
    compare(models, 1)
    mlp = models[0].model.layers[0].mlp
    for _ in range(2):
        mlp.forward = lambda x: torch.zeros_like(x)
        compare(models, 1)
        del mlp.forward
        _, report = written(*models, 1, compile_config=EAGER)
        assert report.num_graphs == 0 and report.num_compiled_rounds
    copied = copy.deepcopy(models[0])
    assert written(copied, models[1], 1)[0] == written(*models, 1)[0]


# -- signatures ------------------------------------------------------------------------------------------------------------


def llama(seed=0):
    return tiny.build("llama", seed, num_hidden_layers=1).float()


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def numbered(model):
    model.model.layers[0].self_attn.scaling *= 2


def packed(model):
    model.lm_head = PackedLinear(llama(3).lm_head)


def test_another_graph_for_each_change():
    for changes in ((tied,), (numbered,), (packed, packed)):
        model = llama()
        known = [Signature.of(model)]
        assert Signature.of(model).key == known[0].key
        for step in changes:
            step(model)
            known.append(Signature.of(model))
        assert len({signature.key for signature in known}) == len(known)
        assert all(signature.trusted for signature in known)


@pytest.mark.parametrize("where", ["every module", "model.layers.0"])
def test_a_hook_is_run(where):
    models, seen = pair(), []
    layers = [model.model.layers[0] for model in models]
    if where == "every module":
        handles = [torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))]
    else:
        handles = [layer.register_forward_hook(lambda module, *_: seen.append(module)) for layer in layers]
    try:
        _, report = written(*models, 1, compile_config=EAGER, max_new_tokens=5)
    finally:
        for handle in handles:
            handle.remove()
    assert report.eager_because == f"a forward hook stands on {where}"
    assert sum(module in layers for module in seen) == sum(report.forwards.values())


def test_tensors_that_two_models_share():
    one, other = llama(), llama()
    assert shared([Signature.of(one), Signature.of(other)]) == ()
    other.lm_head = one.lm_head
    signatures = [Signature.of(one), Signature.of(other)]
    numbers = (signature.tensors[id(one.lm_head.weight)] for signature in signatures)
    assert shared(signatures) == ((0, 1, *numbers),)
    assert shared([Signature.of(one)]) == ()


@pytest.mark.full
def test_what_transformers_compiles_of_a_model_is_no_part_of_the_model():
    model = hla.enable(llama())
    known = Signature.of(model)
    model.get_compiled_call(CompileConfig())
    model.generate(torch.ones(1, 3).long(), cache_implementation="static", max_new_tokens=2, disable_compile=True)
    assert {"_compiled_call", "_previous_max_cache_length"} <= vars(model).keys()
    assert Signature.of(model) == known and known.trusted
