"""Tensors that a call leaves behind can be copied, changed and trained on like any other, by the caller's callbacks too; no forward records gradients."""

import copy
import itertools

import pytest
import torch
from support import small, tiny
from support.tiny import cache_of
from transformers import DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


def watch(*models):
    """Record the modes of each forward of `models`: [(gradients are on, inference mode is on), …]."""
    seen = []
    for model in models:
        model.register_forward_pre_hook(lambda *_: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled())))  # fmt: skip
    return seen


def run(target, draft, **settings):
    given = {"assistant_model": draft, "lossy_policy": "strict", "max_new_tokens": 12, "do_sample": False}
    return hla.enable(target).generate(**tiny.prompts((9,)), **given | settings, return_dict_in_generate=True)


@pytest.mark.parametrize("how", ["a cache passed in", "t5", "lfm2 as draft", "quantised"])
def test_no_forward_records_gradients(how):
    name = how if how in tiny.ONE_ROW else "llama"
    target = tiny.build(name)
    draft = tiny.build("lfm2") if how == "lfm2 as draft" else copy.deepcopy(target)
    if how == "quantised":
        target.is_quantized = True
    seen = watch(target, draft)
    cache = {CACHE: DynamicCache(config=target.config)} if how == "a cache passed in" else {}
    out = run(target, draft, **cache)
    assert seen and not any(gradients for gradients, _ in seen)
    again = copy.deepcopy(cache_of(out))  # fails for tensors with a graph behind them
    assert again.get_seq_length() == cache_of(out).get_seq_length() > 9 * (name != "t5")


def test_a_graph_that_the_caller_builds_around_the_call_is_left_alone():
    """Gradients that are on outside are on again afterwards, and parameters get none from the call."""
    target = tiny.build("llama")
    with torch.enable_grad():
        run(target, target, **{CACHE: DynamicCache(config=target.config)})
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert all(p.grad is None for p in target.parameters())


@pytest.mark.full
@pytest.mark.parametrize("which", ["target", "draft", "companion"])
def test_a_quantised_model_never_runs_in_inference_mode(which):
    """It may keep what it makes at its first forward, and an inference tensor would spoil it for training."""
    models = {name: tiny.build("llama", seed) for seed, name in enumerate(("target", "draft", "companion"))}
    models[which].is_quantized = True
    seen = watch(models[which])
    policy = hla.LossyPolicy(filter=hla.Staged(models["companion"]))
    run(models["target"], models["draft"], lossy_policy=policy)
    assert seen and not any(inference for _, inference in seen)


@pytest.mark.parametrize("lengths", [(9,), (9, 5, 7)])
def test_outputs_are_ordinary_tensors(lengths):
    model, inputs = hla.enable(tiny.shared("llama")), tiny.prompts(lengths)
    out = model.generate(
        **inputs, assistant_model=tiny.draft_of(model, "often"), lossy_policy="strict", max_new_tokens=12,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    tensors = [out.sequences, *out.scores, *out.logits]
    if cache_of(out) is not None:
        tensors += [t for layer in cache_of(out).layers for t in (layer.keys, layer.values)]
    assert not any(t.is_inference() for t in tensors)
    out.sequences += 0  # in place, as a caller may
    model.train()
    model(**inputs).logits.sum().backward()  # nothing that the loop made stays behind in the model
    model.zero_grad()
    model.eval()


@pytest.fixture(scope="module")
def models():
    target = small.llama()
    return hla.enable(target), small.near(target, 0.1)


def guided(input_ids, scores):
    """Move scores along the gradient of a function of them."""
    with torch.enable_grad():
        leaf = scores.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(leaf.softmax(dim=-1)[:, ::2].sum(), leaf)
    return scores + 10.0 * gradient


def test_a_processor_takes_gradients_and_what_a_criterion_keeps_can_be_trained_on(models):
    recorded, settings = [], {"max_new_tokens": 10, "do_sample": False, "logits_processor": [guided]}

    def keeping(ids, scores, **kwargs):
        recorded.append((ids, scores[-1]))
        return torch.zeros(len(ids), dtype=torch.bool)

    settings |= {"return_dict_in_generate": True, "output_scores": True, "stopping_criteria": [keeping]}
    alone = models[0].generate(**small.ragged(), **settings).sequences
    drafted = models[0].generate(**small.ragged(), **settings, assistant_model=models[1], lossy_policy="strict")
    assert torch.equal(drafted.sequences, alone)
    table = torch.nn.Embedding(small.VOCAB, small.VOCAB)
    ids, scores = recorded[-1]
    (table(ids[:1])[:, -1] * scores).sum().backward()
    assert table.weight.grad.abs().sum() > 0


def test_what_a_streamer_raises_is_passed_on(models):
    """At its `number`-th piece; the first is the prompt, before the rounds begin."""
    given = small.one() | {"max_new_tokens": 6, "assistant_model": models[1], "lossy_policy": "strict"}
    for number, error in itertools.product((1, 4), (ConnectionResetError("client left"), None)):
        left = iter(range(number - 1))
        streamer = small.Listener()

        def put(value, left=left, error=error):
            if next(left, None) is None:
                raise error or torch.zeros(2).view(3)  # or a library does

        streamer.put = put
        with pytest.raises(RuntimeError if error is None else ConnectionResetError) as raised:
            models[0].generate(**given, streamer=streamer)
        assert raised.value is error if error else "shape" in str(raised.value)
