"""Criteria that the caller passes beside, or in place of, those of the generation config: as in `generate`."""

import pytest
import torch
from support import tiny
from transformers import EosTokenCriteria, MaxLengthCriteria


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


@pytest.mark.parametrize("drafting", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize(
    "kind, length", {"longer": 40, "shorter": 14, "two": 30, "a subclass": 14, "an end that never comes": 20}.items()
)
def test_a_criterion_of_the_callers_own_stops_where_generate_stops(kind, length, drafting):
    model, inputs = tiny.shared("llama"), tiny.prompts((9,))
    settings = {"max_new_tokens": 11, "eos_token_id": tiny.NEVER_EMITTED}
    expected = tiny.greedy(model, inputs, stopping_criteria=criteria(kind), **settings)
    assert expected.shape[1] == length
    draft = None if drafting else tiny.draft_of(model, "often")
    out = tiny.assisted(model, inputs, draft, stopping_criteria=criteria(kind), **settings, **drafting)
    assert torch.equal(out.sequences, expected)
