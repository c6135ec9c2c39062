"""A call's random numbers are its generator's: the global state does not matter, and with one for each row neither do the other rows."""

from functools import cache

import pytest
import torch
from scipy.stats import kstest
from support import tiny

import hf_lossy_assist as hla
from hf_lossy_assist.batch.randomness import Randomness, RowRandomness


PROMPTS = (9, 1, 4, 14)
POLICIES = {"svip": "svip", "block verification": hla.BlockVerification(), "top_k": hla.TopK(2)}
pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy")


@cache
def pair():
    target = tiny.shared("llama")
    return target, tiny.draft_of(target, "often")


def write(generator, inputs, policy="strict", **settings):
    target, draft = pair()
    settings = {"do_sample": True, "temperature": 1.5, "top_k": 0, "eos_token_id": tiny.NEVER_EMITTED} | settings
    return tiny.assisted(target, inputs, draft, policy, generator=generator, **settings)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("policy", ["svip", pytest.param("block verification", marks=pytest.mark.full)])
def test_one_seed_is_one_text_whatever_the_global_state_which_is_left_alone(policy):
    pair()  # made with the global generator
    texts = []
    for state in (1, 2):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        texts.append(write(seeded(7), tiny.prompts(PROMPTS), POLICIES[policy]).sequences)
        write([seeded(i) for i in range(4)], tiny.prompts(PROMPTS))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*texts)
    assert not torch.equal(texts[0], write(seeded(8), tiny.prompts(PROMPTS), POLICIES[policy]).sequences)


@pytest.mark.parametrize("policy", ["svip", pytest.param("top_k", marks=pytest.mark.full)])
def test_a_row_with_a_seed_does_not_depend_on_the_rows_beside_it(policy):
    inputs = tiny.prompts(PROMPTS)
    together = write([seeded(i) for i in range(4)], inputs, POLICIES[policy]).sequences
    for b, length in enumerate(PROMPTS):
        alone = {name: x[b : b + 1, -length:] for name, x in inputs.items()}
        single = write([seeded(b)], alone, POLICIES[policy]).sequences
        assert torch.equal(together[b, max(PROMPTS) :], single[0, length:]), b
    pair = {name: x[1:3] for name, x in inputs.items()}
    some = write([seeded(1), seeded(2)], pair, POLICIES[policy]).sequences
    assert torch.equal(together[1:3, max(PROMPTS) :], some[:, inputs["input_ids"].shape[1] :])


def test_a_rows_numbers_come_back_and_are_all_different():
    one, other = RowRandomness(seeded(1)), RowRandomness(seeded(1))
    numbers = []
    for randomness in (one, other):
        randomness.begin_round()
        other_stream = randomness.for_filters().coins(5)
        waits = [randomness.exponentials(slot, 5) for slot in (0, 1)]
        numbers.append([randomness.coins(5), *waits, other_stream])
    for a, b in zip(*numbers, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one.coins(3), numbers[0][0][:3]), "the first numbers do not depend on how many are asked for"
    assert len({float(x[0]) for x in numbers[0]}) == 4
    one.begin_round()
    assert not torch.equal(one.coins(5), numbers[0][0])


def test_what_is_refused():
    with pytest.raises(TypeError, match="expected a torch.Generator"):
        write(7, tiny.prompts((5,)))
    with pytest.raises(ValueError, match="2 generators were given, and this call has 1 rows"):
        write([seeded(1), seeded(2)], tiny.prompts((5,)))


def test_a_rows_numbers_never_come_back():
    """torch's generator for the CPU keeps 32 bits of a seed: numbers whose seed was made of round and place came back after 2048 rounds."""
    randomness, seen = RowRandomness(seeded(1)), {}
    for number in range(5000):
        randomness.begin_round()
        drawn = randomness.coins(2), randomness.exponentials(3, 2), randomness.for_filters().coins(2)
        for what, x in zip(("coins", "drawn", "filter"), drawn, strict=True):
            assert (key := tuple(x.tolist())) not in seen, (what, number, seen.get(key))
            seen[key] = what, number


def test_a_rows_numbers_are_spread_as_they_should_be():
    randomness, coins, waits = RowRandomness(seeded(2)), [], []
    for _ in range(200):
        randomness.begin_round()
        coins.append(randomness.coins(100))
        waits.append(randomness.exponentials(0, 100))
    coins, waits = torch.cat(coins).double(), torch.cat(waits).double()
    assert kstest(coins.numpy(), "uniform").pvalue > 1e-3 and kstest(waits.numpy(), "expon").pvalue > 1e-3
    assert 0 <= coins.min() and coins.max() < 1 and waits.min() > 0
    one, next_ = coins.view(200, 100)[:-1].flatten(), coins.view(200, 100)[1:].flatten()
    assert abs(float(torch.corrcoef(torch.stack([one, next_]))[0, 1])) < 0.03  # rounds beside each other


def test_waits_are_those_of_torch():
    """The same numbers of the generator, and of them the same waits, bit by bit: a seed stands for a text."""
    generator, twin = seeded(7), seeded(7)
    for shape in ((1, 1), (3, 5), (8, 50_000)):
        waits = Randomness(generator).exponentials(torch.arange(shape[0]), 0, shape[1], torch.device("cpu"))
        assert torch.equal(waits, torch.empty(shape).exponential_(generator=twin))
        assert torch.equal(generator.get_state(), twin.get_state())
