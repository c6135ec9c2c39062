"""The tests of a contest's program, run beside it in its own process (`contests`): this text goes in front of the call.

It is not meant to be imported: names that it needs are imported inside, before the program can change them.
"""

COMMON = """
from typing import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
from math import *
from builtins import *
import sys, re, string, random, collections, itertools, functools, heapq, bisect, math, operator, copy, datetime, statistics
"""  # what solutions take for granted, as on the contests' own sites


def check_calls(source, name, tests):
    """Call the function, or the method of `Solution`: a line of JSON for each argument, and the value that must come back."""
    import json

    space: dict = {"__name__": "solution"}
    exec(COMMON, space)
    exec(compile(source, "solution", "exec"), space)
    called = getattr(space["Solution"](), name) if "Solution" in space else space[name]
    for number, test in enumerate(tests, 1):
        given = [json.loads(line) for line in test["input"].split("\n") if line.strip()]
        found, expected = called(*given), json.loads(test["output"])
        assert _plain(found) == expected, f"test {number} of {len(tests)}"


def _plain(value):
    """Tuples are lists in JSON."""
    return [_plain(its) for its in value] if isinstance(value, list | tuple) else value


def check_program(source, tests):
    """Run the program as a script on each test's input, and compare what it prints."""
    import io
    import sys

    code = compile(source, "solution", "exec")
    for number, test in enumerate(tests, 1):
        before, space = (sys.stdin, sys.stdout), {"__name__": "__main__"}
        exec(COMMON, space)
        printed = io.BytesIO()
        sys.stdin = io.TextIOWrapper(io.BytesIO(test["input"].encode()), encoding="utf-8")
        sys.stdout = out = io.TextIOWrapper(printed, encoding="utf-8", write_through=True)
        try:
            exec(code, space)
        except SystemExit:
            pass
        finally:
            out.flush()  # and it is kept until here: what is thrown away closes what it wrote to
            sys.stdin, sys.stdout = before
        found = printed.getvalue().decode("utf-8", "replace")
        assert _same_output(found, test["output"]), f"test {number} of {len(tests)}"


def _same_output(found, expected):
    """Line by line, blanks at the ends apart; lines of numbers by their values."""
    sides = [[line.strip() for line in text.strip().split("\n")] for text in (found, expected)]
    return len(sides[0]) == len(sides[1]) and all(map(_same_line, *sides))


def _same_line(found, expected):
    from decimal import Decimal, InvalidOperation

    if found == expected:
        return True
    try:
        return [Decimal(word) for word in found.split()] == [Decimal(word) for word in expected.split()]
    except InvalidOperation:
        return False
