"""Callbacks of the caller's that keep tensors, change them, or take gradients: served as `generate` serves them."""

import pytest
import torch
from support import small
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_lossy_assist as hla


@pytest.fixture(scope="module")
def models():
    target = small.llama()
    return hla.enable(target), small.near(target, 0.1)


def both(models, inputs, **settings):
    """What `generate` writes alone and with a draft; `settings` are functions that make each call's own."""
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


@pytest.mark.parametrize("inputs", [small.one(), small.ragged()], ids=["one", "ragged"])
def test_a_processor_takes_gradients(models, inputs):
    alone, drafted = both(models, inputs, logits_processor=lambda: LogitsProcessorList([Guided()]))
    assert torch.equal(drafted, alone)


class Keeping(StoppingCriteria):
    def __init__(self):
        self.kept = []

    def __call__(self, input_ids, scores, **kwargs):
        self.kept.append((input_ids, scores[-1]))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_what_a_criterion_keeps_can_be_trained_on(models):
    keeping, kept = Keeping(), {"return_dict_in_generate": True, "output_scores": True}
    models[0].generate(
        **small.one(), max_new_tokens=6, do_sample=False, assistant_model=models[1], lossy_policy="strict",
        stopping_criteria=StoppingCriteriaList([keeping]), **kept,
    )  # fmt: skip
    table = torch.nn.Embedding(small.VOCAB, small.VOCAB)
    ids, scores = keeping.kept[-1]
    (table(ids)[:, -1] * scores).sum().backward()
    assert table.weight.grad.abs().sum() > 0


class Failing(BaseStreamer):
    """Raises at its `number`-th piece; the first is the prompt, before the rounds begin."""

    def __init__(self, number, error):
        self.left, self.error = number, error

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            raise self.error
        torch.zeros(1).view(1)

    def end(self):
        pass


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("error", [ConnectionResetError("client left"), KeyError("x"), ValueError("mine")], ids=repr)
def test_what_a_streamer_raises_is_passed_on(models, error, number):
    with pytest.raises(type(error)) as raised:
        models[0].generate(**small.one(), max_new_tokens=6, assistant_model=models[1], lossy_policy="strict", streamer=Failing(number, error))  # fmt: skip
    assert raised.value is error


class FailingWithin(Failing):
    """Its error comes out of a library."""

    def put(self, value):
        torch.zeros(2).view(3)


def test_also_where_it_comes_out_of_a_library(models):
    with pytest.raises(RuntimeError, match="shape"):
        models[0].generate(**small.one(), max_new_tokens=6, assistant_model=models[1], lossy_policy="strict", streamer=FailingWithin(1, None))  # fmt: skip


class Masking(BaseStreamer):
    """Changes what it is given, once the call is over."""

    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value)

    def end(self):
        pass


def test_a_streamer_may_change_its_tokens(models):
    streamer = Masking()
    models[0].generate(
        **small.one(), max_new_tokens=6, do_sample=False, assistant_model=models[1], lossy_policy="strict", streamer=streamer
    )  # fmt: skip
    for tokens in streamer.heard:
        tokens.add_(1)
