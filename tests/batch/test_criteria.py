"""Criteria that the caller passes beside, or in place of, those of the generation config, as in `generate`; and lengths that are never reached."""

import pytest
import torch
from support import small, tiny
from transformers import Cache, EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

import hf_lossy_assist as hla
from hf_lossy_assist.batch import rows as sequences
from hf_lossy_assist.generation.runner import Runner


class EvenLength(MaxLengthCriteria):
    """Stops at the first even length from its own on: a subclass that is more than its fields."""

    def __call__(self, input_ids, scores, **kwargs):
        length = input_ids.shape[1]
        return torch.full((len(input_ids),), length >= self.max_length and length % 2 == 0)


class Never(EosTokenCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


CRITERIA = {  # and how long the text is
    "shorter": (lambda: [MaxLengthCriteria(14)], 14),
    "two": (lambda: [MaxLengthCriteria(40), MaxLengthCriteria(30)], 30),
    "a subclass": (lambda: [EvenLength(13)], 14),
    "an end that never comes": (lambda: [Never(eos_token_id=list(range(90)))], 20),
}


def test_a_custom_criterion_stops_where_generate_stops():
    model, inputs = tiny.shared("llama"), tiny.prompts((9,))
    settings = {"max_new_tokens": 11, "eos_token_id": tiny.NEVER_EMITTED}
    for n, (kind, (make, length)) in enumerate(CRITERIA.items()):
        expected = tiny.greedy(model, inputs, stopping_criteria=make(), **settings)
        assert expected.shape[1] == length
        draft, drafting = (tiny.draft_of(model, "often"), {}) if n % 2 else (None, {"prompt_lookup_num_tokens": 3})
        out = tiny.assisted(model, inputs, draft, stopping_criteria=make(), **settings, **drafting)
        assert torch.equal(out.sequences, expected), kind


# -- a criterion of the caller's in a batch -------------------------------------------------------------------------------


class Limits(StoppingCriteria):
    """Ends each row at a length of its own."""

    def __init__(self, *limits):
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.limits


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
LENGTHS = ((9,), (9, 6, 4), (9, 9))
ENDS = (None, tiny.NEVER_EMITTED, 5)
DRAFTS = ("always", "rarely", None)
ROWS = [  # each pair of values together
    (ANSWERS[name], LENGTHS[n], ENDS[(n + i) % 3], DRAFTS[(2 * n + i) % 3])
    for i, name in enumerate(ANSWERS)
    for n in range(3)
]


@pytest.mark.parametrize(
    ("ends", "lengths", "eos", "draft"),
    [pytest.param(*row, marks=[pytest.mark.full] * (len(row[1]) == 1 or row[2:] == (None, "always"))) for row in ROWS],
)
def test_a_callers_criterion_is_called_as_generate_calls_it(ends, lengths, eos, draft):
    """As often, with the same tokens of all rows; so a counter, or one that reads row 0, ends the same texts."""
    model, inputs = tiny.shared("llama"), tiny.prompts(lengths)
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": eos, "pad_token_id": tiny.PAD}
    settings |= {"output_scores": True, "return_dict_in_generate": True}
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


@pytest.mark.full
@pytest.mark.parametrize("name", ["a counter", "row 0"])
def test_one_criterion_for_all_texts_is_refused_where_it_remembers(name):
    """A function makes one for each prompt; if it returns one object twice, that is shared, too."""

    class Counting(Watching):
        def __call__(self, input_ids, scores, **kwargs):
            self.calls = [*self.calls, 0] if name == "a counter" else self.calls
            return self.ends(self.calls, input_ids)

    settings, model, shared = {"max_rows": 3}, tiny.shared("llama"), Counting(ANSWERS[name])
    expected = []
    for ids in PROMPTS:
        given = {"stopping_criteria": [Counting(ANSWERS[name])], "max_new_tokens": 16}
        expected.append(tiny.greedy(model, {"input_ids": torch.tensor([ids])}, **given)[0, 3:].tolist())
    assert many(lambda ids: [Counting(ANSWERS[name])], **settings) == expected
    for criteria in ([Counting(ANSWERS[name])], lambda ids: [shared]):
        if name == "a counter":
            with pytest.raises(ValueError, match=r"^stopping_criteria: Counting remembers [^\n]*lambda ids: \[…\]$"):
                many(criteria, **settings)
        else:
            assert many(criteria, **settings) == expected


def test_each_row_has_a_place_in_a_criterion():
    """And one token is written behind a prompt that is too long."""
    model, settings = tiny.shared("llama"), {"max_new_tokens": 16, "eos_token_id": tiny.NEVER_EMITTED}
    for lengths, criterion, left in (((9, 6, 4), Limits(20, 12, 16), (11, 3, 7)), ((9,), MaxLengthCriteria(5), (1,))):
        inputs, settings["stopping_criteria"] = tiny.prompts(lengths), [criterion]
        alone = tiny.greedy(model, inputs, **settings)
        assert tuple((row != tiny.PAD).sum() for row in alone[:, 9:]) == left
        out = tiny.assisted(model, inputs, tiny.draft_of(model, "rarely"), **settings)
        assert torch.equal(out.sequences, alone)


class Recording(StoppingCriteria):
    def __init__(self):
        self.scores = []

    def __call__(self, input_ids, scores, **kwargs):
        self.scores.append(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("keeps", [True, pytest.param(False, marks=pytest.mark.full)])
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


def test_another_answer_is_loud():
    model = tiny.shared("llama")
    for criterion in (SaysNothing(), Limits(20, 12)):
        with pytest.raises(RuntimeError, match=r"^[^\n]+$"):
            tiny.assisted(model, tiny.prompts((9, 6, 4)), tiny.draft_of(model, "often"), stopping_criteria=[criterion])


# -- a `max_new_tokens` that is never reached costs nothing: the storage of texts grows with them, as the caches do ----------


FAR = 10**8  # four rows of int64 would be 3.2 GB


class Looking(Runner):
    """Sees what the call has allocated when its rounds are over."""

    def decode(self, call):
        stats = super().decode(call)
        self.found = list(tensors(call, set()))
        return stats


def tensors(thing, seen: set[int]):
    """Every tensor that an object of this package, or a cache, holds on to; not the weights of models."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors(value, seen)
    elif type(thing).__module__.startswith("hf_lossy_assist") or isinstance(thing, Cache):
        yield from tensors(vars(thing), seen)


@pytest.mark.parametrize("policy", ["svip", "staged", "prompt lookup"])
def test_nothing_is_sized_by_it(policy):
    target, inputs = small.llama(), small.ragged((0, 1, 2, 3))
    settings = {"do_sample": False, "max_new_tokens": FAR, "eos_token_id": list(range(small.VOCAB)), "pad_token_id": 0}
    if policy == "prompt lookup":
        runner, inputs = Looking(hla.LossyPolicy().with_fallback(), None), small.one()
        settings["prompt_lookup_num_tokens"] = 3
    else:
        runner = Looking(hla.Staged(small.llama(seed=1)) if policy == "staged" else policy, small.near(target))
    out = type(target).generate(target, **inputs, **settings, custom_generate=runner)
    assert out.shape[0] == len(inputs["input_ids"])
    assert any(t.dtype == torch.int64 and t.dim() == 2 for t in runner.found), "the texts are among them"
    assert max(t.untyped_storage().nbytes() for t in runner.found) < 2**20


def test_the_text_is_the_same_while_storage_grows(monkeypatch):
    monkeypatch.setattr(sequences, "STEP", 7)
    settings, target = {"repetition_penalty": 1.2}, small.llama()
    for inputs in (small.ragged((0, 3, 5)), small.one()):
        plain = type(target).generate(target, **inputs, max_new_tokens=30, do_sample=False, **settings)
        drafted = hla.enable(target).generate(
            **inputs, max_new_tokens=30, do_sample=False, assistant_model=small.near(target), lossy_policy="strict", **settings
        )  # fmt: skip
        assert torch.equal(drafted, plain)
