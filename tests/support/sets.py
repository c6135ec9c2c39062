"""Hooks of pytest for the three sets of tests: `make test` (no mark), `make test-all` (`full` too), `make nightly` (all)."""

import os
from collections import defaultdict

import pytest


MARKS = ("full", "nightly")
BEGUN = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption(
        "--cpu-limit", type=float, metavar="SECONDS", help="fail a test of `make test` that takes more CPU time"
    )


def columns(item) -> list[list[str]]:
    """The names of a test's parameters, those that one `parametrize` sets together in one list."""
    given = [mark.args[0] for mark in item.iter_markers("parametrize")]
    given = [names.split(",") if isinstance(names, str) else names for names in given]
    together = [[name.strip() for name in names] for names in given]
    return together + [[name] for name in item.callspec.params if name not in sum(together, [])]


def diagonal(item, places) -> int:
    """The number of a case's diagonal in the matrix of its parameters: the sum of the places of their values."""
    test, number = item.nodeid.partition("[")[0], 0
    for names in columns(item):
        seen = places[(test, *names)]
        number += seen.setdefault(tuple(id(item.callspec.params[name]) for name in names), len(seen))
    return number


@pytest.hookimpl(tryfirst=True)  # before the cases that are left out are taken away
def pytest_collection_modifyitems(items):
    """Under `full(every=n)` or `nightly(every=n)` each n-th diagonal of a test's cases goes without the mark."""
    places = defaultdict(dict)
    for item in items:
        if any("every" in mark.kwargs for mark in item.own_markers):
            number = diagonal(item, places)
            item.own_markers = [
                mark for mark in item.own_markers if "every" not in mark.kwargs or number % mark.kwargs["every"]
            ]


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[BEGUN] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    limit, spent = item.config.option.cpu_limit, cpu_seconds() - item.stash[BEGUN]
    if limit and spent > limit and not any(map(item.get_closest_marker, MARKS)):
        pytest.fail(f"{spent:.1f} s of CPU time, at most {limit:g} in `make test`: mark it `full`", pytrace=False)
    return result
