"""`assistant_early_exit` in several threads of one model: each writes the model's own text, and its config is nobody's to change."""

import threading
from functools import partial, update_wrapper
from types import MethodType

import pytest
import torch
from support import small, tiny
from transformers import LogitsProcessor, LogitsProcessorList

import hf_lossy_assist as hla


class Waiting(LogitsProcessor):
    """Changes nothing; at its `at`-th call, which comes inside a draft, it waits until every thread is there."""

    def __init__(self, barrier, at):
        self.barrier, self.left = barrier, at

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0:
            self.barrier.wait(timeout=60)
        return scores


def written_beside(*calls):
    """What `calls` return, each in a thread of its own."""
    out = [None] * len(calls)

    def run(i):
        out[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_threads_inside_their_drafts(name):
    model = hla.enable(tiny.build(name))
    settings = {"max_new_tokens": 12, "do_sample": False}
    prompts = [tiny.prompts((9,), seed) for seed in range(3)]
    wanted = [model.generate(**inputs, **settings) for inputs in prompts]
    barrier, layers = threading.Barrier(3), []
    draft = tiny.draft_of(model, "often")

    def early(inputs, at):
        processors = LogitsProcessorList([Waiting(barrier, at)])
        settings_ = settings | {"assistant_early_exit": 1, "logits_processor": processors}
        return lambda: model.generate(**inputs, **settings_, lossy_policy="strict")

    def strict():
        barrier.wait(timeout=60)  # both others are inside a draft
        layers.append(model.config.num_hidden_layers)
        return model.generate(**prompts[2], **settings, assistant_model=draft, lossy_policy="strict")

    found = written_beside(early(prompts[0], 1), early(prompts[1], 2), strict)
    assert layers == [2] and model.config.num_hidden_layers == 2
    for got, expected in zip(found, wanted, strict=True):
        assert got is not None and torch.equal(got, expected)
    assert torch.equal(model.generate(**prompts[0], **settings), wanted[0])


@pytest.mark.parametrize("how", ["as it is", "a method", "a partial, as accelerate's"])
def test_the_draft_does_leave_early(how):
    """Blocks behind the exit see the target's forwards alone, also where somebody has replaced a `forward` of the model."""
    model, calls = hla.enable(small.llama(layers=3)), [0, 0, 0]
    for module in (model, model.model):
        if how == "a method":
            module.forward = MethodType(type(module).forward, module)
        elif how != "as it is":
            module._old_forward = module.forward
            module.forward = partial(lambda its, *args, **kwargs: its._old_forward(*args, **kwargs), module)
            update_wrapper(module.forward, module._old_forward)
    for i, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    model.generate(**small.one(), max_new_tokens=12, do_sample=False, assistant_early_exit=1, lossy_policy="strict")
    assert calls[0] > calls[1] == calls[2]
