"""The three sets of tests: which cases `full` and `nightly` leave to the faster sets, and that a slow one of `make test` fails."""

import pytest


pytest_plugins = ["pytester"]

CASES = """
import pytest
both = pytest.mark.parametrize(("name", "number"), [("a", 0), ("b", 1), ("c", 2), ("d", 3)])

@pytest.mark.full(every=4)
@pytest.mark.nightly(every=2)
@both
@pytest.mark.parametrize("other", range(4))
def test_matrix(name, number, other): ...

@pytest.mark.full
def test_full(): ...

@pytest.mark.nightly
def test_nightly(): ...
"""
SLOW = """
import pytest, subprocess, sys, time
BUSY = "import time\\nwhile time.process_time() < 0.3: pass"

def test_quick(): time.sleep(0.2)

@pytest.mark.full
def test_full(): subprocess.run([sys.executable, "-c", BUSY])

def test_slow(): subprocess.run([sys.executable, "-c", BUSY])
"""


@pytest.fixture
def inner(pytester):
    """Another pytest, in this process, with the hooks alone."""
    pytester.makeconftest("from support.sets import *")
    pytester.makeini(
        "[pytest]\naddopts = -p no:xdist -p no:randomly -p no:cacheprovider\nmarkers =\n  full\n  nightly\n"
    )
    return pytester


@pytest.mark.parametrize(("chosen", "count"), [("not full and not nightly", 4), ("not nightly", 9), ("", 18)])
def test_diagonals_stay_in_the_faster_sets(inner, chosen, count):
    inner.makepyfile(CASES)
    inner.runpytest_inprocess("-m", chosen).assert_outcomes(passed=count, deselected=18 - count)


def test_every_value_of_every_parameter_is_on_a_diagonal(inner):
    inner.makepyfile(CASES)
    result = inner.runpytest_inprocess("-v", "-m", "not full and not nightly")
    cases = [
        line.partition("[")[2].partition("]")[0].split("-") for line in result.outlines if "::test_matrix" in line
    ]
    assert [sorted(values) for values in zip(*cases, strict=True)] == [list("0123"), list("abcd"), list("0123")]


@pytest.mark.full
def test_a_test_over_the_limit_fails_unless_it_is_marked(inner):
    """By CPU time, that of processes included: what waits is not slow."""
    inner.makepyfile(SLOW)
    result = inner.runpytest_inprocess("--cpu-limit", "0.15")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*s of CPU time, at most 0.15 in `make test`: mark it `full`"])
    inner.runpytest_inprocess().assert_outcomes(passed=3)
