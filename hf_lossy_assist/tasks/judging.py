"""The task whose answer is the response itself, judged by a model: AutoJudge, appendix L, after Arena-Hard (Li et al.
2024)."""

import re
import threading
from collections.abc import Sequence
from typing import Protocol

from ..validation import check_int
from .answers import Data, FileTask, Problem, Row, squeeze


VERDICTS = {"A>>B": -2, "A>B": -1, "A=B": 0, "B>A": 1, "B>>A": 2}  # how much better B is
_VERDICT = re.compile(r"\[\[\s*(A>>B|A>B|A=B|B>A|B>>A)\s*\]\]")

INSTRUCTIONS = """You compare two replies to one request. Judge whether they are right, whether they answer what was asked, and \
whether they are clear; neither their order nor their length counts. Say in a few sentences what you find, then close with \
exactly one of these verdicts:
[[A>>B]] A is much better
[[A>B]] A is a little better
[[A=B]] they are about equally good
[[B>A]] B is a little better
[[B>>A]] B is much better"""
AGAIN = "Your reply holds none of the verdicts. Reply with one of [[A>>B]], [[A>B]], [[A=B]], [[B>A]], [[B>>A]] and nothing else."


class Judge(Protocol):
    """What `QATask` asks of a judge; `endpoint.Endpoint` is one."""

    def chat(self, messages: Sequence[dict[str, str]], max_tokens: int, temperature: float = 0.0) -> str: ...


def verdict(reply: str) -> int | None:
    """How much better B is than A by the last verdict in `reply`, from -2 to 2; None where there is none."""
    found = _VERDICT.findall(reply)
    return VERDICTS[found[-1]] if found else None


class QATask(FileTask):
    """Questions with free text for an answer: JSON lines with `prompt` or `question`. There is no gold answer.

    `same(problem, reference, answer)` asks `judge` whether `answer` is as good as `reference` or better. Each vote
    shows the two in both orders, so that a judge that prefers a place contradicts itself; a vote is for "worse" only
    if one order says so and the other does not say the opposite. `answer` is equivalent unless most of `votes` find it
    worse; asking stops when that can no longer change. A reply without a verdict is asked for again up to `attempts`
    times in all; then the vote is for "worse", which makes the token an important one, and `unreadable` counts it.
    Without a judge there are prompts, and comparing two replies raises `ValueError`.
    """

    name = "qa"
    slow = True
    against_running = True

    def __init__(
        self,
        path: Data,
        judge: Judge | None = None,
        *,
        votes: int = 3,
        attempts: int = 3,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        ends: tuple[str, ...] = (),
    ):
        super().__init__(path)
        check_int("votes", votes, 1, 1000)
        check_int("attempts", attempts, 1, 1000)
        self.judge, self.votes, self.attempts, self.ends = judge, votes, attempts, ends
        self.max_tokens, self.temperature = max_tokens, temperature
        self.unreadable = 0
        self._lock = threading.Lock()

    def problem(self, row: Row) -> Problem:
        return Problem(row.text("prompt", "question", "turns"), None, row.values)

    def extract(self, problem: Problem, response: str) -> str | None:
        return self.cut(response).strip() or None

    def same(self, problem: Problem, reference: str, answer: str) -> bool:
        if squeeze(reference) == squeeze(answer):
            return True
        worse, kept = 0, 0
        while 2 * max(worse, kept) <= self.votes and worse + kept < self.votes:
            if self._worse(problem.prompt, reference, answer):
                worse += 1
            else:
                kept += 1
        return worse <= kept

    def _worse(self, request: str, reference: str, answer: str) -> bool:
        """One vote."""
        found = self.versus(request, reference, answer)
        if found is None:
            with self._lock:
                self.unreadable += 1
            return True
        return found < 0

    def versus(self, request: str, reference: str, answer: str) -> int | None:
        """1 where the judge finds `answer` better than `reference`, −1 where worse, each in one order at least and the opposite in
        none; 0 where neither; None where it gives no verdict."""
        gains = [self._ask(request, reference, answer), self._ask(request, answer, reference)]
        if gains[0] is None or gains[1] is None:
            return None
        low, high = sorted((gains[0], -gains[1]))  # how much better `answer` is, by either order
        return -1 if low < 0 and high <= 0 else 1 if low >= 0 and high > 0 else 0

    def _ask(self, request: str, a: str, b: str) -> int | None:
        """How much better `b` is than `a`, or None where the judge gives no verdict."""
        if self.judge is None:
            raise ValueError(
                f"the task {self.name} compares texts by a judge model: pass the address of an OpenAI-compatible server "
                "and the name of its model (--judge-url, --judge-model)"
            )
        shown = f"# The request\n\n{request}\n\n# Reply A\n\n{a}\n\n# Reply B\n\n{b}"
        messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": shown}]
        for _ in range(self.attempts):
            reply = self.judge.chat(messages, self.max_tokens, self.temperature)
            gain = verdict(reply)
            if gain is not None:
                return gain
            messages = [*messages[:2], {"role": "assistant", "content": reply}, {"role": "user", "content": AGAIN}]
        return None
