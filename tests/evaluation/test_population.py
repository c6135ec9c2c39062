"""The certificate keeps its word on real answers of the demo pair (`benchmarks/certificates.py`), ladders climbed in any order."""

import certificates
import numpy as np
import pytest
from certificates import DELTA, ORDERS, USERS, Population, limits, outcome, read

from hf_lossy_assist.evaluation.tuning import parse_search_space


MOST = DELTA + 3 * np.sqrt(DELTA * (1 - DELTA) / USERS)


@pytest.fixture(scope="module")
def population():
    return read()


@pytest.mark.full
def test_the_table_is_of_the_settings_that_it_names(population):
    field = parse_search_space(certificates.POLICIES)
    assert population.names == [*field.lossless, *(step.name for step in field.steps)]
    assert (
        population.rates[0] == 0 and population.gain[0].sum() == 0
    )  # greedily a lossless policy writes the target's text
    assert population.harm.shape[1] >= 200 and len(limits(population)) >= 4


@pytest.mark.full
@pytest.mark.parametrize("order", ORDERS[:2])
def test_users_who_draw_real_problems_are_kept_to(population, order):
    """At limits just below true rates of harm, a low and a high one, and at one that all settings keep."""
    every = limits(population)
    found = [outcome(population, limit, order) for limit in (every[0], every[len(every) // 2], every[-1])]
    assert max(its.broken for its in found) <= MOST
    assert any(its.broken > 0 for its in found)  # the limits are where a certificate can break
    assert found[-1].near >= 0.95 and found[-1].broken == 0


@pytest.mark.full
def test_a_certificate_that_promises_too_much_would_show(population, monkeypatch):
    """At δ = 0.3 and the same promise users are let down, and the test above would see it."""
    certify = certificates.certify
    monkeypatch.setattr(certificates, "certify", lambda *args: certify(*args[:-1], 0.3))
    assert outcome(population, limits(population)[2], ORDERS[0]).broken > MOST


@pytest.mark.full
def test_a_known_population():
    """Two settings: one without harm that is a tenth faster, one that harms a fifth and is twice as fast."""
    steps = parse_search_space(["svip", "top_k:k=2+svip", "top_k:k=3+svip"]).steps
    harm = np.zeros((3, 100), dtype=bool)
    harm[2, :20] = True
    seconds = np.ones((3, 100)) / np.array([[1.0], [1.1], [2.0]])
    names = ["svip", *(step.name for step in steps)]
    its = outcome(
        Population(names, harm, np.zeros_like(harm), np.ones((3, 100)), seconds, steps), 0.1, ORDERS[0], users=50
    )
    assert (its.broken, its.chosen, its.certified, its.best, its.near) == (0, 0, 1, "top_k:k=2+svip", 1)
