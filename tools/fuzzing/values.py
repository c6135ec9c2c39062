"""Invalid values of every kind, and damage to JSON, bytes and files."""

import copy
import json
import os
import pickle
import random as random_module
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


Random = random_module.Random
Make = Callable[[], Any]  # makes a new value each time: a call may change its arguments

ESCAPE = "\x1b]0;owned\x07\x1b[31mred"


class Shouting:
    """An object whose name has two lines and an escape sequence."""

    def __repr__(self) -> str:
        return f"Shouting(\n{ESCAPE})"


def nested(depth: int) -> list[Any]:
    out: list[Any] = []
    for _ in range(depth):
        out = [out]
    return out


NUMBERS: list[Any] = [
    -1, 0, 1, 2, 3, 7, 96, 97, 10**9, 2**31, 2**63, 10**30, -(10**30), 10**400, 10**5000, -0.5, 0.0, 0.3, 0.999, 1.0, 1.5, 5.0,
    1e30, 1e-30, 1e308, float("nan"), float("inf"), float("-inf"), True, False, np.int64(3), np.float32(0.5), np.nan, 3j,
]  # fmt: skip
TEXTS: list[Any] = [
    "",
    " ",
    "x",
    "five",
    "strict",
    "3",
    "a\nb",
    ESCAPE,
    "\x00",
    "ü" * 3,
    "x" * 100_000,
    b"strict",
    "../..",
    "/",
]
OTHERS: list[Make] = [
    list, dict, tuple, set, object, Shouting,
    lambda: [0], lambda: [[]], lambda: [5, 6], lambda: [[5, 6], [7]], lambda: (1, 2, 3), lambda: [None], lambda: ["x"],
    lambda: {"name": "svip"}, lambda: {1: 2}, lambda: {"a": {"b": [1]}}, lambda: nested(50), lambda: nested(3000),
    lambda: list(range(5000)), lambda: int, lambda: len, lambda: range(3), lambda: Path("nowhere"),
    lambda: torch.tensor(3), lambda: torch.tensor([5, 6]), lambda: torch.zeros(2, 2), lambda: torch.full((40, 40), float("nan")),
    lambda: torch.zeros(3, device="meta"), lambda: np.zeros((30, 30)), lambda: Exception("x\ny"),
]  # fmt: skip


def always(value: Any) -> Make:
    return lambda: value


def junk(random: Random) -> Make:
    """Return a value that is usually invalid anywhere."""
    kind = random.random()
    if kind < 0.5:
        return always(random.choice(NUMBERS))
    if kind < 0.65:
        return always(random.choice([*TEXTS, None]))
    return random.choice(OTHERS)


def shown(value: Any) -> str:
    """Return a short repr of one line."""
    short = reprlib.Repr()
    short.maxother = short.maxstring = 80
    short.maxdict = short.maxlist = short.maxtuple = 8
    try:
        return short.repr(value).replace("\n", " ").replace("\x1b", "^[")
    except ValueError:  # an int too long to be written
        return f"<{type(value).__name__}>"


# -- JSON -----------------------------------------------------------------------------------------------------------------

# Inserted literally for a string "@name", since `json.dumps` cannot write them.
RAW = {
    "@deep": "[" * 3000 + "]" * 3000, "@deeper": '{"a":' * 100_000 + "1" + "}" * 100_000, "@long": "1" + "0" * 5000,
    "@large": "1" + "0" * 30, "@infinite": "1e999", "@nan": "NaN", "@minus": "-Infinity", "@twice": '{"name": "svip", "name": "strict"}',
    "@half": "[1,", "@bare": "name", "@control": '"\x1b[31m"', "@surrogate": '"\\ud800"', "@escape": '"\\u001b]0;owned\\u0007"',
}  # fmt: skip
ENTRIES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 16, 97, 10**30, -0.5, 0.3, 1.0, 1e30, "", "x", "strict", "../..", "/etc", "a\nb", "org/name",
    [], {}, [1], [[1, 2]], {"name": "svip"}, ["strict"], {"stop": "svip"}, [None] * 500, "x" * 20_000, *RAW,
]  # fmt: skip


def mutated(random: Random, value: Any) -> Any:
    """Return a copy of a JSON value with one to three entries changed."""
    out = json.loads(json.dumps(value))
    for _ in range(random.randint(1, 3)):
        holder, key = _place(random, out)
        if holder is None:
            out = _entry(random)
            break
        how = random.random()
        if how < 0.65:
            holder[key] = _entry(random)
        elif how < 0.8:
            del holder[key]
        elif how < 0.9:
            holder[key] = [copy.deepcopy(holder[key]) for _ in range(random.randint(1, 3))]
        elif isinstance(holder, dict):
            holder[str(random.choice(["name", "x", "head", "_", key + "s", ESCAPE]))] = copy.deepcopy(holder[key])
        else:
            holder.append(copy.deepcopy(holder[key]))
    return out


def _entry(random: Random) -> Any:
    """Return a copy of one of `ENTRIES`, so that later changes do not reach the list itself."""
    return copy.deepcopy(random.choice(ENTRIES))


def _place(random: Random, value: Any) -> tuple[Any, Any]:
    """Return a random nested object or list and a key in it, or (None, None) without any."""
    places = []

    def walk(holder: Any) -> None:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            places.append((holder, key))
            walk(holder[key])

    walk(value)
    return random.choice(places) if places and random.random() < 0.97 else (None, None)


def written(value: Any) -> str:
    """Return JSON text, with the values that `RAW` represents."""
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text


def damaged_text(random: Random, text: str) -> bytes:
    """Return JSON, damaged as text or as bytes."""
    how, at = random.randrange(9), random.randrange(max(len(text), 1))
    if how == 0:
        return text[:at].encode()
    if how == 1:
        return (text[:at] + text[at + 1 :]).encode()
    if how == 2:
        return (text[:at] + random.choice('"{}[],:\\x0\x00\x1b\n') + text[at:]).encode()
    if how == 3:
        return b"\xef\xbb\xbf" + text.encode()
    if how == 4:
        return text.encode("utf-16")
    if how == 5:
        return text.encode()[:at] + bytes([random.randrange(128, 256)]) + text.encode()[at:]
    if how == 6:
        return (text + text).encode()
    if how == 7 and '": ' in text:
        key = text[text.index('"') : text.index('": ') + 3]
        return text.replace(key, f"{key}null, {key}", 1).encode()  # the same key twice
    return random.choice(
        [b"", b"null", b"[]", b"{}", b"\x00" * 50, b"<html>\n</html>", b"\x80\x04", text.upper().encode()]
    )


# -- bytes and files ----------------------------------------------------------------------------------------------------------


def damaged_bytes(random: Random, data: bytes) -> bytes:
    """Return `data` with bytes flipped, cut off, inserted or removed."""
    how, at = random.randrange(7), random.randrange(max(len(data), 1))
    if how == 0:
        return data[:at]
    if how == 1:
        return data + bytes(random.randrange(256) for _ in range(20))
    if how == 2:
        return bytes(8) + data[8:]
    if how == 3:
        return b"\xff" * 7 + b"\x7f" + data[8:]  # a header of 2**63 bytes
    if how == 4:
        return random.choice(
            [b"", b"\x80\x04N.", pickle.dumps({"linear.weight": [1.0]}), b"PK\x03\x04" + bytes(30), data[8:]]
        )
    flipped = bytearray(data)
    for _ in range(random.choice([1, 1, 5])):
        place = random.randrange(min(len(data), random.choice([8, 200, len(data)])))
        flipped[place] ^= 1 << random.randrange(8)
    return bytes(flipped)


def replaced_file(random: Random, file: Path) -> str:
    """Replace a file by something else; return what."""
    ways = {
        "missing": 3,
        "empty": 3,
        "folder": 3,
        "itself": 3,
        "dangling": 3,
        "elsewhere": 3,
        "pipe": 3,
        "unlike": 3,
        "sparse": 1,
    }
    how = random.choices(list(ways), list(ways.values()))[0]
    data = file.read_bytes()
    file.unlink()
    if how == "empty":
        file.write_bytes(b"")
    elif how == "folder":
        file.mkdir()
    elif how == "itself":
        file.symlink_to(file.name)
    elif how == "dangling":
        file.symlink_to("nowhere")
    elif how == "elsewhere":  # as the Hub's cache has it
        moved = file.with_name(f".kept-{file.name}")
        moved.write_bytes(data)
        file.symlink_to(moved.name)
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "sparse":
        with open(file, "wb") as made:
            made.write(data)
            made.truncate(2**29)
    elif how == "unlike":
        file.with_suffix(".bin").write_bytes(pickle.dumps({}))
    return how
