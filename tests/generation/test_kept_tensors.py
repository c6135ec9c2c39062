"""Tensors that a call leaves behind can be copied, changed and trained on like any other, by the caller's callbacks too; no forward records gradients."""

import copy

import pytest
import torch
from support import small, tiny
from support.tiny import cache_of
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


def watch(*models):
    """Record the modes of each forward of `models`: [(gradients are on, inference mode is on), …]."""
    seen = []
    for model in models:
        model.register_forward_pre_hook(
            lambda *_: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        )
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


def both(models, inputs, **settings):
    """Return what `generate` writes alone and with a draft; `settings` are functions that make each call's own."""
    out = []
    for drafting in ({}, {"assistant_model": models[1], "lossy_policy": "strict"}):
        made = {name: make() for name, make in settings.items()}
        out.append(models[0].generate(**inputs, max_new_tokens=10, do_sample=False, **drafting, **made))
    return out


class Guided(LogitsProcessor):
    """Moves scores along the gradient of a function of them."""

    def __call__(self, input_ids, scores):
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            loss = leaf.softmax(dim=-1)[:, ::2].sum()
            (gradient,) = torch.autograd.grad(loss, leaf)
        return scores + 10.0 * gradient


def test_a_processor_takes_gradients(models):
    alone, drafted = both(models, small.ragged(), logits_processor=lambda: LogitsProcessorList([Guided()]))
    assert torch.equal(drafted, alone)


class Keeping(StoppingCriteria):
    def __init__(self):
        self.recorded = []

    def __call__(self, input_ids, scores, **kwargs):
        self.recorded.append((input_ids, scores[-1]))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_what_a_criterion_keeps_can_be_trained_on(models):
    keeping, options = Keeping(), {"return_dict_in_generate": True, "output_scores": True}
    models[0].generate(
        **small.one(), max_new_tokens=6, do_sample=False, assistant_model=models[1], lossy_policy="strict",
        stopping_criteria=StoppingCriteriaList([keeping]), **options,
    )  # fmt: skip
    table = torch.nn.Embedding(small.VOCAB, small.VOCAB)
    ids, scores = keeping.recorded[-1]
    (table(ids)[:, -1] * scores).sum().backward()
    assert table.weight.grad.abs().sum() > 0


class Failing(BaseStreamer):
    """Raises at its `number`-th piece, or lets a library raise; the first is the prompt, before the rounds begin."""

    def __init__(self, number, error):
        self.left, self.error = number, error

    def put(self, value):
        self.left -= 1
        if self.left == 0 and self.error is None:
            torch.zeros(2).view(3)
        if self.left == 0:
            raise self.error

    def end(self):
        pass


def test_what_a_streamer_raises_is_passed_on(models):
    given = small.one() | {"max_new_tokens": 6, "assistant_model": models[1], "lossy_policy": "strict"}
    for number in (1, 4):
        error = ConnectionResetError("client left")
        with pytest.raises(ConnectionResetError) as raised:
            models[0].generate(**given, streamer=Failing(number, error))
        assert raised.value is error
        with pytest.raises(RuntimeError, match="shape"):
            models[0].generate(**given, streamer=Failing(number, None))
