"""The choice of tokens that a round verifies: the vectorised choice against the paper's loop, and what it would have been for another token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_lossy_assist.filters.sv import choose


LEVELS = (0.0, 0.1, 0.25, 0.5, 0.7, 0.9, 1.0)  # few, so that rows and tokens often tie


def grown(accept, seconds, sure):
    """Section 5 of the paper as it is written: add the token that adds most, from whichever row, while goodput rises."""
    counts, reach, total, sent = [0] * len(accept), [1.0] * len(accept), sure, 0
    while True:
        open_rows = [b for b, row in enumerate(accept) if counts[b] < len(row)]
        if not open_rows:
            return counts
        gains = {b: reach[b] * accept[b][counts[b]] for b in open_rows}
        best = max(open_rows, key=lambda b: (gains[b], -b))
        if not (total + gains[best]) / seconds[sent + 1] > total / seconds[sent]:
            return counts
        total, sent, reach[best] = total + gains[best], sent + 1, gains[best]
        counts[best] += 1


@st.composite
def rounds(draw):
    batch, gamma = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    accept = draw(st.lists(st.sampled_from(LEVELS), min_size=batch * gamma, max_size=batch * gamma))
    steps = draw(st.lists(st.sampled_from((0.0, 0.01, 0.1, 0.3)), min_size=batch * gamma, max_size=batch * gamma))
    sure = draw(st.sampled_from((0.0, float(batch), batch - 0.5)))
    return np.array(accept).reshape(batch, gamma), 1.0 + np.cumsum([0.0, *steps]), sure


@pytest.mark.full
@given(rounds())
def test_the_choice_is_the_papers_loop(case):
    accept, seconds, sure = case
    assert choose(accept, seconds, sure).counts.tolist() == grown(accept.tolist(), seconds, sure)


@given(rounds(), st.randoms(use_true_random=False))
def test_what_would_have_been_verified(case, random):
    accept, seconds, sure = case
    batch, gamma = accept.shape
    at = np.array([random.randrange(gamma) for _ in range(batch)])
    would = choose(accept, seconds, sure).would_verify(at, np.tile(LEVELS, (batch, 1)))
    for b in range(batch):
        for k, level in enumerate(LEVELS):
            other = accept.copy()
            other[b, at[b]] = level
            assert would[b, k] == (grown(other.tolist(), seconds, sure)[b] > at[b])


@given(rounds(), st.randoms(use_true_random=False))
def test_later_tokens_of_a_row_do_not_decide(case, random):
    accept, seconds, sure = case
    batch, gamma = accept.shape
    b, i = random.randrange(batch), random.randrange(gamma)
    other = accept.copy()
    other[b, i + 1 :] = [random.choice(LEVELS) for _ in range(gamma - i - 1)]
    first, second = (choose(a, seconds, sure).counts[b] > i for a in (accept, other))
    assert first == second


def test_hand_made_rounds():
    flat, steep = np.ones(7), 1.0 + np.arange(7.0)
    accept = np.array([[0.9, 0.9, 0.1], [0.5, 1.0, 1.0]])
    assert choose(accept, flat, 2.0).counts.tolist() == [3, 3]  # verifying costs nothing
    assert choose(accept, steep, 2.0).counts.tolist() == [0, 0]  # each token costs as much as a whole round
    assert choose(accept, 1.0 + 0.3 * np.arange(7.0), 2.0).counts.tolist() == [2, 0]
    assert choose(accept, steep, 0.0).counts.tolist() == [2, 0]  # the paper's form: something is always verified
    assert choose(np.zeros((2, 3)), flat, 2.0).counts.tolist() == [0, 0]


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_that_drafted_nothing(batch):
    assert choose(np.zeros((batch, 0)), np.ones(1), float(batch)).counts.tolist() == [0] * batch
