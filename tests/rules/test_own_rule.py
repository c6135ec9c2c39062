"""A rule that is one function: the same as the class of the same formula, alone, in `generate` and in the stock loop; or one line."""

import itertools

import pytest
import torch
from support.blocks import changed, decide, outcome, random_block, same
from support.refusals import refused

import hf_lossy_assist as hla
from hf_lossy_assist import LossyPolicy, OwnRule, Strict, Typical


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


def typical(laws):
    return laws.px > (0.3 * torch.exp(-laws.entropy)).clamp(max=0.09)


def nothing(laws):
    return laws.entropy < 0


def test_it_is_the_rule_of_its_formula():
    for function, rule in ((typical, Typical()), (nothing, Strict())):
        for sampling in (False, True):
            block = changed(random_block(0), sampling=sampling)
            verdict = outcome(rule, block)
            assert same(verdict, outcome(OwnRule(function), block))
            assert verdict.lossy.any() == (function is typical)


def test_what_it_says_of_itself():
    policy = LossyPolicy(rule=OwnRule(typical))
    assert not policy.lossless and "OwnRule" in str(policy)
    refused(policy.to_dict, "OwnRule has no name")
    for function, words in (
        (lambda laws: laws.px, "got float32 of shape"),
        (lambda laws: True, "got True"),
        (lambda laws: laws.p > 0, r"got bool of shape \(200, 4, 6\)"),
        (lambda laws: torch.tensor(True), r"got bool of shape \(\)"),
        (lambda laws: laws.px[:1] >= 0, r"got bool of shape \(1, 4, 1\)"),
        (lambda laws: laws.px[:, :1] >= 0, r"got bool of shape \(200, 1, 1\)"),
    ):
        words = r"OwnRule: function: expected bool of shape \(200, 4, 1\), " + words
        for rule in (OwnRule(function), hla.Limited(OwnRule(function)), hla.Union((Strict(), OwnRule(function)))):
            refused(lambda rule=rule: decide(rule, random_block(0)), words, TypeError)


def answering(**answers):
    """A rule whose methods answer so, whatever they are asked."""
    methods = {name: lambda self, *_, answer=answer: answer for name, answer in answers.items()}
    return type("Mine", (hla.AcceptanceRule,), methods)()


ANSWERS = (None, 1.0, torch.ones(2, 1, dtype=torch.bool), torch.ones(3, dtype=torch.bool), torch.ones(2, 3))


def test_a_class_that_answers_something_else_is_named():
    for sampling, answer in itertools.product((False, True), ANSWERS):
        block = changed(random_block(0), sampling=sampling)
        rows, gamma = block.tokens.shape
        rule = answering(accepts=answer)
        words = rf"Mine: accepts: expected bool of shape \({rows}, {gamma}\), got "
        for each in (rule, hla.Limited(rule), hla.Union((Strict(), rule))):
            refused(lambda each=each, block=block: decide(each, block), words, TypeError)
        methods = ["correction", "probability"] if sampling else ["choice"]
        for name in methods if answer is None else [*methods, "unchecked"]:  # None: no token is accepted unchecked
            rule = answering(**{name: answer})
            refused(lambda rule=rule, block=block: decide(rule, block), f"Mine: {name}: expected ", TypeError)


FORMULAS = [
    (False, lambda laws: laws.px), (False, lambda laws: laws.p > 0.1), (False, lambda laws: laws.px[..., 0] > 0.1),
    (True, lambda laws: laws.p), (True, lambda laws: laws.px[..., 0]), (True, lambda laws: torch.tensor(1.0)),
    (True, lambda laws: 1.0), (True, lambda laws: laws.px[:1]),
]  # fmt: skip


def test_a_formula_that_answers_something_else_is_named():
    """Where it is asked about some of the tokens, too."""
    for sampling, answer in FORMULAS:
        methods = {name: lambda self, laws, answer=answer: answer(laws) for name in ("keeps", "chance")}
        rule, block = type("Mine", (hla.Pointwise,), methods)(), changed(random_block(0), sampling=sampling)
        words = f"Mine: {'chance' if sampling else 'keeps'}: expected "
        refused(lambda rule=rule, block=block: decide(rule, block), words, TypeError)


def test_a_formula_that_answers_for_no_token_is_named_where_coins_are_tossed():
    """In the engine and in the stock loop; one value for each position, like the entropy, is an answer."""
    block, q = changed(random_block(0), sampling=True), torch.full((1, 6), 1 / 6)
    logits = block.logits[:1, 0]
    for answer in (torch.tensor(True), torch.ones(1, dtype=torch.bool)):
        rule = type("Mine", (hla.Pointwise,), {"keeps": lambda self, dists, answer=answer: answer})()
        refused(lambda rule=rule: decide(rule, block), "Mine: keeps: expected bool of ", TypeError)
        words = r"Mine: keeps: expected bool of shape \(1, 6\), "
        refused(lambda rule=rule: rule.output_distribution(logits, q), words, TypeError)
    every = OwnRule(lambda dists: dists.entropy >= 0)
    assert torch.allclose(every.output_distribution(logits, q), q)
