"""An EAGLE drafter's probabilities along a finished text, its choices in mining, and SVIP calibrated for it."""

import pytest
import torch
from support import eagle, small

import hf_lossy_assist as hla
from hf_lossy_assist.methods.autojudge.draft_predictions import StatesPredictions
from hf_lossy_assist.methods.autojudge.generation_backend import Sampler


@pytest.fixture(scope="module")
def target():
    return hla.enable(small.llama(layers=3))


def expected_along(target, net, text, first, places):
    """The logits that predict tokens `first` … of `text`, (n, V), without caches."""
    rows = []
    for place in range(first, len(text)):
        begin = place - (place - first) % places
        behind = text[begin:place].tolist()
        rows.append(eagle.chain(target, net, text[:begin], len(behind) + 1)[0] if not behind else
                    eagle.chain_with_states(target, net, text[:begin], len(behind) + 1, 0, behind)[0])  # fmt: skip
    return torch.stack([row[-1] for row in rows])


@pytest.mark.parametrize("places", [1, 3])
def test_along_a_text(target, places):
    drafter, text = eagle.drafter(target), small.one(14)["input_ids"][0]
    reader = drafter.hook(target)
    with torch.no_grad(), reader:
        target(text[None, :-2])
        states = reader.take_states()[0]
    for first in (2, 5):
        found = drafter.logits_along(target, text[:-1], states, len(text) - first, places)
        torch.testing.assert_close(found, expected_along(target, drafter.network, text, first, places))
    assert found.isinf().any() and found.isfinite().any(), "the vocabulary is reduced"


@pytest.mark.parametrize("places", [1, 3])
def test_choices_along_responses_that_change(target, places):
    """As the search asks: of a response, and of others that go on otherwise."""
    drafter, prompt = eagle.drafter(target), small.one(5)["input_ids"][0].tolist()
    choices = StatesPredictions(drafter, target, prompt, 64, Sampler([]), places)
    one, other = ([int(token) for token in torch.randint(4, 97, (9,), generator=torch.Generator().manual_seed(seed))] for seed in (1, 2))  # fmt: skip
    for response, start in ((one, 0), ([*one[:4], *other], 5), (one[:3], 2), (one, 9)):
        text, first = torch.tensor(prompt + response), len(prompt) + start
        want = expected_along(target, drafter.network, text, first, places).argmax(dim=-1).tolist() if start < len(response) else []  # fmt: skip
        assert choices(response, start) == want
    short = StatesPredictions(drafter, target, prompt[:1], 64, Sampler([]), places)
    assert short(one, 0)[0] == one[0] and len(short(one, 0)) == len(one)
