"""Logits processors of the caller's: asked about nothing that cannot be committed, each row in its place, and functions of their inputs."""

import functools
from dataclasses import dataclass

import pytest
import torch
from support import small
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

import hf_lossy_assist as hla


TRIE = {(): [5, 6], (5,): [7], (6,): [8], (5, 7): [3], (6, 8): [3]}
POLICIES = ["svip", hla.Limited(hla.TopK(2), per_request=3), hla.Union((hla.Typical(), hla.TopK(2)))]


def grammar(row, ids):
    """Raises `KeyError` for a text that the grammar does not begin."""
    return TRIE[tuple(ids[9:].tolist())]


class Grammar(LogitsProcessor):
    """The same as a processor."""

    def __call__(self, input_ids, scores):
        mask = torch.full_like(scores, -torch.inf)
        for b, text in enumerate(input_ids):
            mask[b, grammar(b, text)] = 0.0
        return scores + mask


def stock(model, **settings):
    return type(model).generate(model, **settings)


def ours(model, draft, policy="strict", **settings):
    return hla.enable(model).generate(assistant_model=draft, lossy_policy=policy, **settings)


@pytest.fixture(scope="module")
def models():
    target = small.llama()
    return target, small.near(target, 0.03)


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_grammar_is_not_called_behind_its_end(models, policy):
    """As a function for SVIP, as a processor for the others."""
    asking = {"prefix_allowed_tokens_fn": grammar} if policy == "svip" else {"logits_processor": [Grammar()]}
    settings = {"max_new_tokens": 10, "eos_token_id": 3, "pad_token_id": 0} | asking
    expected = stock(models[0], **small.one(), **settings, do_sample=False)
    assert expected.shape[1] == 12
    assert torch.equal(ours(*models, policy, **small.one(), **settings, do_sample=False), expected)
    for row in ours(*models, policy, **small.ragged(), **settings, do_sample=True)[:, 9:].tolist():
        assert row in ([5, 7, 3], [6, 8, 3])


@dataclass(frozen=True)
class Mine(hla.AcceptanceRule):
    """A rule that may look at whole drafts, for all that is known."""

    def accepts(self, verified, coins):
        return super().accepts(verified, coins)


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_a_rule_that_decides_about_whole_drafts_is_refused(models):
    line = r"^logits_processor: Grammar may remember [^\n]*, and \w+ decides about whole drafts: choose[^\n]*$"
    for rule in (hla.BlockVerification(), Mine(), hla.Union((hla.Strict(), Mine())), hla.Limited(Mine())):
        with pytest.raises(ValueError, match=line):
            ours(*models, rule, **small.one(), max_new_tokens=10, logits_processor=[Grammar()])


class Forbidding(LogitsProcessor):
    """Forbid every third token."""

    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[1]) % 3 == 0, -torch.inf)


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("drafting", [{}, {"prompt_lookup_num_tokens": 3}], ids=["model", "lookup"])
def test_a_lossy_rule_keeps_no_token_that_a_callers_processor_forbids(models, drafting):
    target, draft = models[0], None if drafting else small.near(models[0], 0.4)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 5]])}
    policy = hla.LossyPolicy(hla.TopK(small.VOCAB), hla.Constant(4))
    settings = {"max_new_tokens": 24, "do_sample": False}
    free = ours(target, draft, policy, **inputs, **settings, **drafting)[0, 13:]
    settings["logits_processor"] = LogitsProcessorList([Forbidding()])
    text = ours(target, draft, policy, **inputs, **settings, **drafting)[0, 13:]
    assert (free % 3 == 0).any() and not (text % 3 == 0).any()


def until_seven(row, ids):
    """Knows no text of more than six new tokens; its rows end at different places."""
    new = ids[9:].tolist()
    if len(new) >= 6 or 3 in new:
        raise KeyError(tuple(new))
    return [3] if len(new) > row + 1 else list(range(4, 97))


@pytest.mark.parametrize(
    ("draft", "drafted"),
    [("near", 2), *(pytest.param(*x, marks=pytest.mark.full) for x in (("far", 9), ("smaller", 2)))],
)
def test_rows_that_end_apart_and_a_maximal_length(models, draft, drafted):
    target = models[0]
    drafts = {"near": models[1], "far": small.llama(seed=4), "smaller": small.llama(seed=4, vocab=96)}
    settings = {"max_new_tokens": 4, "eos_token_id": 3, "pad_token_id": 0, "prefix_allowed_tokens_fn": until_seven}
    for inputs in (small.ragged((0,) * 3), small.ragged((0, 2, 3, 4, 5))):

        def bounded(row, ids):
            assert len(ids) < 9 + 4
            return until_seven(row, ids)

        given = inputs | settings | {"prefix_allowed_tokens_fn": bounded}
        out = ours(target, drafts[draft], num_assistant_tokens=drafted, **given, do_sample=False)
        alone = [until_alone(target, inputs, row, settings) for row in range(len(inputs["input_ids"]))]
        for row, (got, wanted) in enumerate(zip(out, alone, strict=True)):
            assert got.tolist()[: len(wanted)] == wanted, row
            assert set(got.tolist()[len(wanted) :]) <= {0}


def until_alone(target, inputs, row, settings):
    """Row `row` by itself in `generate`, up to its end."""
    alone = {name: value[row : row + 1] for name, value in inputs.items()}
    function = {"prefix_allowed_tokens_fn": lambda _, ids: until_seven(row, ids)}
    return stock(target, **alone, **settings | function, do_sample=False)[0].tolist()


def test_a_grammar_is_not_called_behind_a_token_it_forbids():
    """A draft of another tokenizer, and prompt lookup, know nothing of it."""
    target = small.llama()
    order = small.words()[::-1]
    tokenizers = {"tokenizer": small.tokenizer(), "assistant_tokenizer": small.tokenizer(order)}
    settings = {"max_new_tokens": 10, "eos_token_id": 3, "pad_token_id": 0, "prefix_allowed_tokens_fn": grammar}
    prompt = {"input_ids": torch.tensor([[5, 3, 9, 6, 8, 5, 7, 11, 20]])}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    expected = stock(target, **prompt, **settings, do_sample=False)
    for drafting in ({"assistant_model": small.near(target), **tokenizers}, {"prompt_lookup_num_tokens": 3}):
        given = prompt | settings | drafting | {"lossy_policy": "strict"}
        assert torch.equal(hla.enable(target).generate(**given, do_sample=False), expected)
        assert hla.enable(target).generate(**given, do_sample=True)[0, 9:].tolist() in ([5, 7, 3], [6, 8, 3])


class Bias(LogitsProcessor):
    """Something of its own for each row of the call."""

    def __init__(self, rows):
        self.bias = 3.0 * torch.randn(rows, small.VOCAB, generator=torch.Generator().manual_seed(5))

    def __call__(self, input_ids, scores):
        return scores + self.bias


@pytest.mark.full
def test_each_row_has_a_place_in_a_processor(models):
    """Each return sequence, too."""
    inputs, rows = small.ragged((0, 1, 2, 3, 4, 5)), 6
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": [3, 11, 30, 31], "pad_token_id": 0}
    settings["logits_processor"] = LogitsProcessorList([Bias(rows)])
    settings["repetition_penalty"] = 1.2
    expected = stock(models[0], **inputs, **settings)
    for draft in (models[1], small.near(models[0], 0.3)):
        assert torch.equal(ours(models[0], draft, **inputs, **settings), expected)
    settings |= {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    out = ours(models[0], small.near(models[0], 0.3), **small.ragged(), **settings)
    assert torch.equal(out, stock(models[0], **small.ragged(), **settings))


def test_scores_of_another_shape_are_refused(models):
    class One(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores[:1]

    line = r"^logits_processor: One must return scores of shape \[3, 97\], got \[1, 97\]$"
    with pytest.raises(ValueError, match=line):
        ours(*models, **small.ragged(), max_new_tokens=4, logits_processor=LogitsProcessorList([One()]))


class Noisy(LogitsProcessor):
    """Its answer depends on Torch's random numbers alone, which a seed fixes."""

    def __call__(self, input_ids, scores):
        return scores + 1e-3 * torch.rand_like(scores)


@pytest.mark.parametrize("inputs", [small.one(), small.ragged()], ids=["one", "ragged"])
def test_a_processor_that_draws_numbers(models, inputs):
    """For one text in the order of `generate`; for several texts that are sampled there is no order to compare with."""
    settings = {"max_new_tokens": 8, "logits_processor": LogitsProcessorList([Noisy()])}
    out = ours(*models, **inputs, **settings, do_sample=True, top_k=1)
    assert torch.equal(out, stock(models[0], **inputs, max_new_tokens=8, do_sample=False))
    if len(inputs["input_ids"]) > 1:
        with pytest.raises(ValueError, match="^logits_processor: Noisy draws Torch's random numbers[^\n]*$"):
            ours(*models, **inputs, **settings)
        return
    states = []
    for run in (stock, functools.partial(ours, draft=models[1])):
        torch.manual_seed(3)
        run(models[0], **inputs, **settings, do_sample=False)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class ByLastToken(TemperatureLogitsWarper):
    """A subclass of a warper that reads the text, which the warper does not."""

    def __call__(self, input_ids, scores):
        last = input_ids[:, -1:]
        return scores / (1.0 + last % 5) + 4.0 * (torch.arange(scores.shape[1]) % 7 == last % 7)


def test_a_subclass_of_a_warper_sees_the_text(models):
    inputs = small.ragged()
    settings = {"max_new_tokens": 16, "do_sample": False, "logits_processor": LogitsProcessorList([ByLastToken(1.0)])}
    assert torch.equal(ours(*models, **inputs, **settings), stock(models[0], **inputs, **settings))
