"""Criteria that the caller passes beside, or in place of, those of the generation config: as in `generate`."""

import pytest
import torch
from support import tiny
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

import hf_lossy_assist as hla


DRAFTS = {"a draft": {}, "prompt lookup": {"prompt_lookup_num_tokens": 3}}


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
        "shorter": lambda: [MaxLengthCriteria(14)],
        "two": lambda: [MaxLengthCriteria(40), MaxLengthCriteria(30)],
        "a subclass": lambda: [EvenLength(13)],
        "an end that never comes": lambda: [Never(eos_token_id=list(range(90)))],
    }
    return made[kind]()


@pytest.mark.parametrize("drafting", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize(
    "kind, length", {"shorter": 14, "two": 30, "a subclass": 14, "an end that never comes": 20}.items()
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


class Watching(StoppingCriteria):
    """Record each call; `ends(calls so far, input_ids)` answers."""

    def __init__(self, ends):
        self.ends, self.calls = ends, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        return self.ends(self.calls, input_ids)


def lm_eval(calls, input_ids):
    """Note which rows have written a token, as lm-eval's criterion does, and end the call when all have."""
    return all(any(call[row][-1] % 4 == 0 for call in calls) for row in range(len(input_ids)))


ANSWERS = {
    "a counter": lambda calls, input_ids: len(calls) >= 6,
    "a counter, for each row": lambda calls, input_ids: torch.full((len(input_ids),), len(calls) >= 6),
    "row 0": lambda calls, input_ids: int(input_ids[0, -1]) % 3 == 0,
    "rows by themselves": lambda calls, input_ids: input_ids[:, -1] % 5 == 0,
    "rows and a counter": lambda calls, input_ids: input_ids[:, -1] < 4 * len(calls),
    "the rows' sum": lambda calls, input_ids: int(input_ids[:, -1].sum()) % 7 == 0,
    "lm-eval": lm_eval,
}


@pytest.mark.full(every=12)
@pytest.mark.nightly(every=6)
@pytest.mark.parametrize("draft", ["always", "rarely", None])
@pytest.mark.parametrize("eos", [None, tiny.NEVER_EMITTED, 5])
@pytest.mark.parametrize("lengths", [(9,), (9, 6, 4), (9, 9)], ids=str)
@pytest.mark.parametrize("ends", ANSWERS.values(), ids=ANSWERS)
def test_a_callers_criterion_is_called_as_generate_calls_it(ends, lengths, eos, draft):
    """As often, with the same tokens of all rows; so a counter, or one that reads row 0, ends the same texts."""
    model, inputs = tiny.shared("llama"), tiny.prompts(lengths)
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": eos, "pad_token_id": tiny.PAD}
    settings |= {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    drafting = {"prompt_lookup_num_tokens": 3} if draft is None else {"assistant_model": tiny.draft_of(model, draft)}
    expected, once = Watching(ends), Watching(ends)
    alone = model.generate(**inputs, **settings, stopping_criteria=[expected])
    settings |= drafting | {"lossy_policy": "strict"}
    drafted = hla.enable(model).generate(**inputs, **settings, stopping_criteria=[once])
    assert torch.equal(drafted.sequences, alone.sequences)
    assert once.calls == expected.calls
    counts = [row.num_new_tokens for row in drafted.speculation.rows]
    assert counts == [sum(token != tiny.PAD for token in row) for row in alone.sequences[:, 9:].tolist()]
    for row, count in enumerate(counts):
        assert torch.allclose(*(torch.stack(out.scores)[:count, row] for out in (drafted, alone)), atol=1e-4)
    assert len(drafted.scores) == max(counts)


PROMPTS = [[4 + n, 9, 30 + n] for n in range(4)]


def many(criteria, **settings):
    """Return the texts of `PROMPTS` by `generate_many`, and by `generate` with one criterion of `made` each."""
    model = hla.enable(tiny.shared("llama"))
    settings |= {"assistant_model": tiny.draft_of(model, "rarely"), "max_new_tokens": 16, "do_sample": False}
    results = hla.generate_many(model, PROMPTS, stopping_criteria=criteria, **settings)
    return [result.token_ids for result in sorted(results, key=lambda result: result.index)]


@pytest.mark.parametrize("name", ["a counter", "row 0", "rows by themselves"])
def test_one_criterion_for_all_texts_is_refused_where_it_remembers(name):
    """A function makes one for each prompt; if it returns one object twice, that is shared, too."""

    class Counting(Watching):
        def __call__(self, input_ids, scores, **kwargs):
            self.calls = [*self.calls, 0] if name == "a counter" else self.calls
            return self.ends(self.calls, input_ids)

    settings, model, shared = {"max_rows": 3}, tiny.shared("llama"), Counting(ANSWERS[name])
    expected = [
        tiny.greedy(model, {"input_ids": torch.tensor([ids])}, stopping_criteria=[Counting(ANSWERS[name])], max_new_tokens=16)[0, 3:].tolist()
        for ids in PROMPTS
    ]  # fmt: skip
    assert many(lambda ids: [Counting(ANSWERS[name])], **settings) == expected
    for criteria in ([Counting(ANSWERS[name])], lambda ids: [shared]):
        if name == "a counter":
            with pytest.raises(ValueError, match=r"^stopping_criteria: Counting remembers [^\n]*lambda ids: \[…\]$"):
                many(criteria, **settings)
        else:
            assert many(criteria, **settings) == expected


def test_each_row_has_a_place_in_a_criterion():
    draft = "rarely"
    alone, drafted = in_a_batch(lambda: [Limits(20, 12, 16)], draft, eos_token_id=tiny.NEVER_EMITTED)
    assert [(row == tiny.PAD).sum() for row in alone[:, 9:]] == [0, 8, 4]
    assert torch.equal(drafted.sequences, alone)


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


@pytest.mark.parametrize("criterion", [SaysNothing(), Limits(20, 12)], ids=["none", "another number"])
def test_another_answer_is_loud(criterion):
    model = tiny.shared("llama")
    with pytest.raises(RuntimeError, match=r"^[^\n]+$"):
        tiny.assisted(model, tiny.prompts((9, 6, 4)), tiny.draft_of(model, "often"), stopping_criteria=[criterion])
