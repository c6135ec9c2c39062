"""A short run of the fuzzer, every area of it; and that it sees what it is to see."""

import time

import fuzz
import pytest
from fuzzing.verdicts import ELSE, REFUSED, RIGHT, Case, Refused, Wrong, judge

from hf_lossy_assist import SVIP


@pytest.mark.full(every=6)
@pytest.mark.parametrize("area", fuzz.AREAS)
def test_a_short_run(area, capsys):
    fuzz.quiet()
    counts = fuzz.fuzz(0, range(12), area)
    assert not counts[area, ELSE], capsys.readouterr().out
    assert counts[area, REFUSED] + counts[area, RIGHT] == 12 and counts[area, REFUSED]


def test_the_same_seed_draws_the_same_cases():
    one, other, third = ([fuzz.run(seed, n)[:2] for n in range(3)] for seed in (0, 0, 1))
    assert one == other != third


def raising(error):
    def call():
        raise error

    return call


def test_the_fuzzer_tells_a_refusal_from_anything_else():
    kinds = {
        "right": (lambda: None, RIGHT),
        "one line of ours": (lambda: SVIP(h=-1), REFUSED),
        "a line of a command": (raising(Refused("hf-lossy: no")), REFUSED),
        "wrong": (raising(Wrong("another text")), ELSE),
        "from elsewhere": (raising(ValueError("here")), ELSE),
        "another kind": (raising(KeyError("here")), ELSE),
        "two lines of a command": (raising(Refused("one\ntwo")), ELSE),
        "a long line of a command": (raising(Refused("x" * 700)), ELSE),
        "an escape sequence": (raising(Refused("\x1b[31m")), ELSE),
        "no end": (lambda: [None for _ in iter(int, 1)], ELSE),
        "no end, asleep": (lambda: time.sleep(600), ELSE),
    }
    for name, (call, kind) in kinds.items():
        assert judge(Case(name, call), 0.2 if name.startswith("no end") else 60).kind == kind, name
