"""Criteria that the caller passes beside, or in place of, those of the generation config: as in `generate`."""

import pytest
import torch
from support import tiny
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

import hf_lossy_assist as hla


DRAFTS = {"a draft": {}, "prompt lookup": {"prompt_lookup_num_tokens": 3}, "early exit": {"assistant_early_exit": 1}}


class EvenLength(MaxLengthCriteria):
    """Stops at the first even length from its own on: a subclass that is more than its fields."""

    def __call__(self, input_ids, scores, **kwargs):
        length = input_ids.shape[1]
        return torch.full((len(input_ids),), length >= self.max_length and length % 2 == 0)


class Never(EosTokenCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def criteria(kind):
    made = {
        "longer": lambda: [MaxLengthCriteria(40)],
        "shorter": lambda: [MaxLengthCriteria(14)],
        "two": lambda: [MaxLengthCriteria(40), MaxLengthCriteria(30)],
        "a subclass": lambda: [EvenLength(13)],
        "an end that never comes": lambda: [Never(eos_token_id=list(range(90)))],
    }
    return made[kind]()


@pytest.mark.full(every=4)
@pytest.mark.parametrize("drafting", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize(
    "kind, length", {"longer": 40, "shorter": 14, "two": 30, "a subclass": 14, "an end that never comes": 20}.items()
)
def test_a_custom_criterion_stops_where_generate_stops(kind, length, drafting):
    model, inputs = tiny.shared("llama"), tiny.prompts((9,))
    settings = {"max_new_tokens": 11, "eos_token_id": tiny.NEVER_EMITTED}
    expected = tiny.greedy(model, inputs, stopping_criteria=criteria(kind), **settings)
    assert expected.shape[1] == length
    draft = None if drafting else tiny.draft_of(model, "often")
    out = tiny.assisted(model, inputs, draft, stopping_criteria=criteria(kind), **settings, **drafting)
    assert torch.equal(out.sequences, expected)


# -- a criterion of the caller's in a batch -------------------------------------------------------------------------------


class Limits(StoppingCriteria):
    """Ends each row at a length of its own."""

    def __init__(self, *limits):
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.limits


def in_a_batch(make, draft="rarely", inputs=None, **settings):
    """Return what `generate` writes, and what it writes with a draft; `make()` gives each call its criteria."""
    model, inputs = tiny.shared("llama"), tiny.prompts((9, 6, 4)) if inputs is None else inputs
    settings = {"max_new_tokens": 16, "do_sample": False} | settings
    alone = model.generate(**inputs, **settings, stopping_criteria=make())
    drafted = tiny.assisted(model, inputs, tiny.draft_of(model, draft), stopping_criteria=make(), **settings)
    return alone, drafted


class Done(StoppingCriteria):
    """Notes which rows have written a token, as lm-eval's criterion does, and ends the call when all have."""

    def __init__(self, token, rows):
        self.token, self.done = token, [False] * rows

    def __call__(self, input_ids, scores, **kwargs):
        for i, row in enumerate(input_ids):
            self.done[i] = self.done[i] or int(row[-1]) == self.token
        return False not in self.done


@pytest.mark.parametrize("draft", ["always", "rarely"])
def test_a_criterion_that_remembers_rows_ends_none_for_another(draft):
    """Each row ends where it has the token itself; in `generate` all end with the last one."""
    model, inputs = tiny.shared("llama"), tiny.prompts((9, 6, 4))
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": tiny.NEVER_EMITTED}
    whole = model.generate(**inputs, **settings)[:, 9:].tolist()
    token = next(t for t in whole[0] if whole[0].index(t) < 6 and all(t not in row[:12] for row in whole[1:]))
    once = Done(token, 3)
    out = tiny.assisted(model, inputs, tiny.draft_of(model, draft), stopping_criteria=[once], **settings)
    assert out.sequences[0, 9:].tolist()[: whole[0].index(token) + 1] == whole[0][: whole[0].index(token) + 1]
    for row, wanted in zip(out.sequences[1:, 9:].tolist(), whole[1:], strict=True):
        end = wanted.index(token) + 1 if token in wanted else 16
        assert row[:end] == wanted[:end]


@pytest.mark.parametrize("draft", ["always", "rarely"])
def test_each_row_has_a_place_in_a_criterion(draft):
    alone, drafted = in_a_batch(lambda: [Limits(20, 12, 16)], draft, eos_token_id=tiny.NEVER_EMITTED)
    assert [(row == tiny.PAD).sum() for row in alone[:, 9:]] == [0, 8, 4]
    assert torch.equal(drafted.sequences, alone)


@pytest.mark.full(every=6)
@pytest.mark.nightly(every=3)
@pytest.mark.parametrize("draft", ["always", "rarely", "never"])
@pytest.mark.parametrize("limits", [(14, 11, 19), (19, 19, 12), (10, 10, 10), (99, 12, 99)], ids=str)
def test_without_an_end_token_ended_rows_are_written_on(limits, draft):
    """There is no padding then: `generate` writes real tokens until all rows have ended."""
    for pad in (None, tiny.PAD):
        alone, drafted = in_a_batch(lambda: [Limits(*limits)], draft, eos_token_id=None, pad_token_id=pad)
        assert alone.shape[1] == min(max(limits), 25)
        assert torch.equal(drafted.sequences, alone)


def test_their_scores_too():
    settings = {"eos_token_id": None, "output_scores": True, "return_dict_in_generate": True}
    model, inputs = tiny.shared("llama"), tiny.prompts((9, 6, 4))
    settings |= {"max_new_tokens": 16, "do_sample": False}
    alone = model.generate(**inputs, **settings, stopping_criteria=[Limits(14, 11, 19)])
    drafted = hla.enable(model).generate(
        **inputs, **settings, stopping_criteria=[Limits(14, 11, 19)], assistant_model=tiny.draft_of(model, "rarely"), lossy_policy="strict"
    )  # fmt: skip
    assert len(drafted.scores) == len(alone.scores) == 10
    assert torch.allclose(torch.stack(drafted.scores), torch.stack(alone.scores), atol=1e-4)


def test_one_token_is_written_behind_a_prompt_that_is_too_long():
    alone, drafted = in_a_batch(lambda: [MaxLengthCriteria(5)], inputs=tiny.prompts((9,)))
    assert alone.shape[1] == 10
    assert torch.equal(drafted.sequences, alone)


class Recording(StoppingCriteria):
    def __init__(self):
        self.scores = []

    def __call__(self, input_ids, scores, **kwargs):
        self.scores.append(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_criterion_sees_all_scores_so_far_where_they_are_returned(keeps):
    made = []

    def make():
        made.append(Recording())
        return [made[-1]]

    model, settings = tiny.shared("llama"), {"max_new_tokens": 16, "do_sample": False, "output_scores": keeps}
    for drafting in ({}, {"assistant_model": tiny.draft_of(model, "rarely"), "lossy_policy": "strict"}):
        hla.enable(model).generate(
            **tiny.prompts((9,)), **settings, **drafting, return_dict_in_generate=True, stopping_criteria=make()
        )
    alone, drafted = (criterion.scores for criterion in made)
    assert len(alone) == len(drafted) > 4
    for expected, found in zip(alone, drafted, strict=True):
        assert (expected is None) == (found is None) == (not keeps)
        if keeps:
            assert len(expected) == len(found)
            assert torch.allclose(torch.cat(expected), torch.cat(found), atol=1e-4)


class SaysNothing(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return None


@pytest.mark.parametrize(
    "criterion, error, line",
    [
        (SaysNothing(), TypeError, "SaysNothing must return a bool for each of the [0-9] rows, got None"),
        (Limits(20, 12), ValueError, r"Limits must return one entry for each of the 3 rows that it was given, and returned a tensor of shape \[2\]: [^\n]*"),
    ],
    ids=["none", "another number"],
)  # fmt: skip
def test_another_answer_is_refused_by_name(criterion, error, line):
    model = tiny.shared("llama")
    with pytest.raises(error, match=f"^stopping_criteria: {line}$"):
        tiny.assisted(model, tiny.prompts((9, 6, 4)), tiny.draft_of(model, "often"), stopping_criteria=[criterion])
