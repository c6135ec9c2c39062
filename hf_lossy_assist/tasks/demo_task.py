"""The embedded task: two-step word problems in templated English, answered in a wording that the prompt's style card asks for.

A deep target obeys the card, `Style: end warm, mark brisk, …`, and a one-layer draft can only guess. If it guesses wrong, the wording changes
but not the answer; if it adds wrong, the answer changes. AutoJudge has to distinguish these two kinds of mismatch.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..validation import check_int, shown
from .base import AnswerTask, Problem


STYLES = ("plain", "warm", "brisk")
KEYS = ("start", "first", "mark", "next", "check", "end")
NAMES = tuple("Ada Ben Cara Dan Eva Finn Gina Hugo Iris Jack Kira Liam".split())
ITEMS = tuple("apples books coins cards eggs keys nuts pens shells stamps".split())
GAINS = ("buys", "finds", "gets", "makes")
LOSSES = ("sells", "loses", "eats", "drops")
SCENES = ("It is a sunny morning.", "The shop is open.", "School is out for the day.", "Rain falls on the old town.")

# Wordings of one part have the same number of tokens, so that a draft can copy numbers by distance alone.
START = {"plain": " We go on step by step.", "warm": " Sure, happy to help you.", "brisk": " Quick count, here we go."}
FIRST = {"plain": " First we have", "warm": " Let us see", "brisk": " Count one is"}
NEXT = {"plain": " After that comes", "warm": " Good, take", "brisk": " Count two is"}
MARK = {"plain": ".", "warm": "!", "brisk": ";"}  # ends a sum
CHECK = {"plain": " It adds up well", "warm": " You can trust that", "brisk": " No doubt about this"}
END = {"plain": " That is all there is.", "warm": " What a nice little sum.", "brisk": " Done, on we go."}

OBEDIENCE = 0.94  # share of wordings in the training texts that follow the card; the rest are random


@dataclass(frozen=True)
class WordProblem:
    """One word problem; `solution` is a good continuation of its prompt."""

    prompt: str
    answer: int
    solution: str


def _make_problem(rng: random.Random, obedience: float) -> WordProblem:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    styles = {key: rng.choice(STYLES) for key in KEYS}
    written = {key: style if rng.random() < obedience else rng.choice(STYLES) for key, style in styles.items()}

    totals, changes, verbs = [rng.randint(10, 79)], [], []
    for _ in range(2):
        gains = [c for c in range(10, 40) if totals[-1] + c <= 99]
        losses = [c for c in range(10, 40) if totals[-1] - c >= 10]
        sign = rng.choice([s for s, options in ((1, gains), (-1, losses)) if options])
        change = sign * rng.choice(gains if sign > 0 else losses)
        changes.append(change)
        verbs.append(rng.choice(GAINS if sign > 0 else LOSSES))
        totals.append(totals[-1] + change)

    scenes = "".join(f" {scene}" for scene in rng.sample(SCENES, rng.randint(0, 3)))
    card = ", ".join(f"{key} {styles[key]}" for key in rng.sample(KEYS, len(KEYS)))
    prompt = (
        f"{scenes} Style: {card}. {name} has {totals[0]} {item}. {name} {verbs[0]} {abs(changes[0])} {item}."
        f" Then {name} {verbs[1]} {abs(changes[1])} {item}. How many {item} does {name} have now?"
    )
    mark = MARK[written["mark"]]
    sums = [
        f" {totals[i]} {'+' if changes[i] > 0 else '-'} {abs(changes[i])} = {totals[i + 1]} {item}{mark}"
        for i in range(2)
    ]
    solution = (
        START[written["start"]]
        + f"{FIRST[written['first']]}{sums[0]}"
        + f"{NEXT[written['next']]}{sums[1]}"
        + f"{CHECK[written['check']]}{mark}"
        + f"{END[written['end']]} The answer is {totals[-1]}."
    )
    return WordProblem(prompt, totals[-1], solution)


def generate_problems(split: str, seed: int) -> Iterator[WordProblem]:
    """Yield problems endlessly. `split` ("train", "calibration" or "test") and `seed` name a stream."""
    rng = random.Random(f"hf-lossy-assist demo {split} {seed}")
    while True:
        yield _make_problem(rng, OBEDIENCE if split == "train" else 1.0)


def problems(n: int, seed: int = 0, split: str = "test") -> list[WordProblem]:
    """Return the first `n` problems of the stream `(split, seed)`; the demo models were trained on `split="train"` only."""
    check_int("problems(n)", n, 0)
    if split not in ("train", "calibration", "test"):
        raise ValueError(f'problems(split): expected "train", "calibration" or "test", got {shown(split)}')
    source = generate_problems(split, seed)
    return [next(source) for _ in range(n)]


def answer(text: str) -> int | None:
    """Return the number in the last "The answer is N." of `text`, or None if there is none."""
    results = re.findall(r"The answer is (\d+)\.", text)
    return int(results[-1]) if results else None


class DemoTask(AnswerTask):
    """The embedded word problems (`hf_lossy_assist.demo`), an endless stream: `problems()` without a limit returns 1000."""

    name = "demo"

    def __init__(self, split: str = "test", seed: int = 0):
        problems(0, seed, split)  # refuses an unknown split
        self.split, self.seed = split, seed

    def problems(self, limit: int | None = None) -> list[Problem]:
        drawn = problems(1000 if limit is None else limit, self.seed, self.split)
        return [Problem(p.prompt, str(p.answer), {"reference": p.solution}) for p in drawn]

    def extract(self, problem: Problem, response: str) -> str | None:
        value = answer(response)
        return None if value is None else str(value)

    def same(self, problem: Problem, reference: str, answer: str) -> bool:
        return int(reference) == int(answer)
