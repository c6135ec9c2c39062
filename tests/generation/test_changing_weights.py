"""Weights that change between two calls, as in a training loop: each text is the one of a model made anew of the weights of that moment."""

import copy

import pytest
import torch
from support.small import PAD, llama, near, ragged
from support.tiny import lora, peft_warns
from transformers import CompileConfig

import hf_lossy_assist as hla


ENDS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD}
WAYS = {
    "draft model": lambda target: {"assistant_model": near(target)},
    "early exit": lambda target: {"assistant_model": hla.early_exit(target, 1)},
    "exit by number": lambda target: {"assistant_early_exit": 1},
    "suffixes": lambda target: {"drafter": "suffix"},
    "compiled": lambda target: {"assistant_model": near(target), "compile_config": CompileConfig(backend="eager")},
}


def fresh_text(make, weights, prompts):
    """Transformers' own text of a model made anew, and of one that was just enabled."""
    texts = []
    for way in ("alone", "enabled"):
        model = make()
        model.load_state_dict(weights)
        settings = {} if way == "alone" else {"assistant_model": near(model), "lossy_policy": "strict"}
        generate = hla.enable(model).generate if settings else model.generate
        texts.append(generate(**prompts, **ENDS, **settings))
    assert torch.equal(*texts)
    return texts[0]


def step(model, optimizer, prompts):
    """Train a little on these texts; enough for others to change."""
    model.train()
    labels = prompts["input_ids"]
    model(**prompts, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


CASES = [(llama, way) for way in WAYS]


@pytest.mark.parametrize("steps", [pytest.param(3), pytest.param(50, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "make, way",
    [pytest.param(*case, marks=[pytest.mark.nightly] if case[1] == "compiled" else []) for case in CASES],
)
def test_optimizer_steps(make, way, steps):
    target, prompts, texts = make(), ragged(), []
    hla.enable(target, **WAYS[way](target), strict=True)
    optimizer = torch.optim.AdamW(target.parameters(), lr=0.01)
    for number in range(steps):
        got = target.generate(**prompts, **ENDS)
        assert torch.equal(got, fresh_text(make, target.state_dict(), prompts))
        texts.append(got.flatten().tolist())
        step(target, optimizer, ragged(seed=number))  # others each time, or soon nothing changes
    assert len({tuple(text) for text in texts}) > 1 + steps // 10 and len(hla.reports(target)) == steps
    if way == "compiled":
        assert all(report.num_compiled_rounds for report in hla.reports(target))
        assert not any(report.num_graphs for report in hla.reports(target)[1:])


@peft_warns
@pytest.mark.parametrize(
    "way",
    [
        "draft model",
        pytest.param("early exit", marks=pytest.mark.full),
        pytest.param("compiled", marks=pytest.mark.nightly),
    ],
)
def test_adapters_are_put_in_trained_switched_merged_and_taken_out(way):
    target, prompts, texts = llama(), ragged(), []
    hla.enable(target, **WAYS[way](target), strict=True)

    def check(model):
        """The text is the one of a copy, which nothing has been remembered of."""
        got = model.generate(**prompts, **ENDS)
        plain = hla.disable(copy.deepcopy(model))
        assert torch.equal(got, plain.generate(**prompts, **ENDS)) and "generate" not in vars(plain)
        texts.append(tuple(got.flatten().tolist()))

    check(target)
    adapted = lora(target, seed=1)
    check(adapted)
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    for _ in range(2):
        step(adapted, torch.optim.AdamW(trained, lr=0.05), prompts)
        check(adapted)
    with adapted.disable_adapter():
        check(adapted)
    adapted.add_adapter("other", adapted.peft_config["default"])
    adapted.set_adapter("other")
    check(adapted)
    adapted.set_adapter("default")
    check(adapted)
    adapted.merge_adapter()
    check(adapted)
    adapted.unmerge_adapter()
    check(adapted)
    merged = adapted.merge_and_unload()
    assert merged is target and hla.is_enabled(target)
    check(merged)
    before, once, _, twice, without, other, *same = texts
    assert without == before and len({before, once, twice, other}) == 4 and {twice} == set(same)
    assert len(hla.reports(target)) == len(texts)
