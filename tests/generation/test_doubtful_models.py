"""The target as its own draft and models in training mode run, and are warned of once for each model."""

import warnings

import pytest
import torch
from support.small import llama, near, one

import hf_lossy_assist as hla


SETTINGS = {"max_new_tokens": 6, "do_sample": False}
OWN, TRAINS = "the target is its own draft", "in training mode"


def write(where, target, draft):
    if where == "generate":
        return hla.enable(target).generate(**one(), **SETTINGS, assistant_model=draft, lossy_policy="strict")
    if where == "generate_many":
        ours = {"assistant_model": draft, "lossy_policy": "strict"}
        return list(hla.generate_many(target, [[4, 5, 6], [7, 8, 9, 10]], **SETTINGS, **ours))
    return target.generate(**one(), **SETTINGS, custom_generate=hla.Runner("strict", draft))


def said(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [line for its in found for line in [str(its.message)] if OWN in line or TRAINS in line]


@pytest.mark.parametrize("where", ["generate", "generate_many", "a runner"])
def test_once_for_each_model(where):
    def lines(target, draft):
        return said(lambda: write(where, target, draft))

    for _ in range(2):  # models of its own each time
        target = llama()
        assert [OWN in line for line in lines(target, target)] == [True] and lines(target, target) == []
        draft = near(target).train()
        [line] = lines(target, draft)
        assert line.startswith("the assistant is in training mode") and line.endswith("call eval() on it first")
        target.train()
        [line] = lines(target, draft)
        assert line.startswith("the target is in training mode") and lines(target, draft) == []


def test_early_exits_and_the_demo_are_not_warned_of():
    target, texts = hla.enable(llama(layers=3)), []
    expected = target.generate(**one(), **SETTINGS)
    demo, inputs = hla.demo.load(), {"input_ids": torch.arange(4, 12)[None]}
    hla.enable(demo.target)

    def lines(model, inputs, **settings):
        return said(lambda: texts.append(model.generate(**inputs, **SETTINGS, **settings, lossy_policy="strict")))

    assert lines(target, one(), assistant_model=hla.early_exit(target, 1)) == []
    assert lines(target, one(), assistant_early_exit=1) == []
    assert all(torch.equal(text, expected) for text in texts)
    assert lines(demo.target, inputs, assistant_model=demo.draft) == []
