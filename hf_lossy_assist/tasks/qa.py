"""Free-text tasks judged by a model (AutoJudge, appendix L, after Arena-Hard, Li et al. 2024)."""

import re
import threading
from collections.abc import Sequence
from typing import Protocol

from ..validation import check_int
from .base import Data, FileTask, Problem, squeeze_blanks
from .prompts import Row, refuse_placeholder


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


class JudgeModel(Protocol):
    """Interface of a judge for `QATask`; `endpoint.Endpoint` implements it."""

    def chat(self, messages: Sequence[dict[str, str]], max_tokens: int, temperature: float = 0.0) -> str: ...


def parse_verdict(reply: str) -> int | None:
    """Return how much better B is than A by the last verdict in `reply`, from -2 to 2; None if there is none."""
    verdicts = _VERDICT.findall(reply)
    return VERDICTS[verdicts[-1]] if verdicts else None


class QATask(FileTask):
    """Questions with free-text answers: JSON lines with `prompt` or `question`. There is no gold answer.

    `same(problem, reference, answer)` asks `judge` whether `answer` is at least as good as `reference`. Each vote shows the two in both orders, so
    that a judge with a positional preference contradicts itself; a vote is for "worse" only if one order says so and the other does not say the
    opposite. `answer` is equivalent unless most of `votes` find it worse; voting stops when that can no longer change. A reply without a verdict is
    requested again, up to `attempts` times in all; then the vote is for "worse", which makes the token important, and `unreadable` counts it.
    Without a judge the task only provides prompts, and comparing two replies raises `ValueError`.
    """

    name = "qa"
    slow = True
    against_running = True

    def __init__(
        self,
        path: Data,
        judge: JudgeModel | None = None,
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
        if squeeze_blanks(reference) == squeeze_blanks(answer):
            return True
        worse, equal = 0, 0
        while 2 * max(worse, equal) <= self.votes and worse + equal < self.votes:
            vote = self._finds_worse(problem.prompt, reference, answer)
            worse, equal = worse + vote, equal + (not vote)
        return worse <= equal

    def _finds_worse(self, request: str, reference: str, answer: str) -> bool:
        """Return one vote."""
        gain = self.versus(request, reference, answer)
        if gain is None:
            with self._lock:
                self.unreadable += 1
        return gain is None or gain < 0

    def versus(self, request: str, reference: str, answer: str) -> int | None:
        """Return 1 if the judge finds `answer` better than `reference`, −1 if worse, each in at least one order and the opposite in none; 0 if
        neither; None if it gives no verdict."""
        gains = [self._ask(request, reference, answer), self._ask(request, answer, reference)]
        if gains[0] is None or gains[1] is None:
            return None
        low, high = sorted((gains[0], -gains[1]))  # how much better `answer` is, in either order
        return -1 if low < 0 and high <= 0 else 1 if low >= 0 and high > 0 else 0

    def _ask(self, request: str, a: str, b: str) -> int | None:
        """Return how much better `b` is than `a`, or None if the judge gives no verdict."""
        if self.judge is None:
            raise ValueError(
                f"the task {self.name} compares texts by a judge model: pass the address of an OpenAI-compatible server "
                "and the name of its model (--judge-url, --judge-model)"
            )
        pair = f"# The request\n\n{request}\n\n# Reply A\n\n{a}\n\n# Reply B\n\n{b}"
        messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": pair}]
        for _ in range(self.attempts):
            reply = self.judge.chat(messages, self.max_tokens, self.temperature)
            gain = parse_verdict(reply)
            if gain is not None:
                return gain
            messages = [*messages[:2], {"role": "assistant", "content": reply}, {"role": "user", "content": AGAIN}]
        return None


class TurnsTask(QATask):
    """Questions with `turns` (`prompt`, or `messages` of a user), the first of which is the prompt, and a `category`, kept in `extra`.

    MT-bench's 80 questions in 8 categories; Spec-Bench's 480 (MT-bench's, translation, summarisation, question answering, GSM8K and
    retrieval); SPEED-Bench's in 11 categories (huggingface.co/papers/2604.09557), in rows of NVIDIA's specdec_bench or of NeMo-Skills,
    of which many are published as placeholders. `read_prompts` reads the same files if only prompts are needed.
    """

    def __init__(self, path: Data, judge: JudgeModel | None = None, name: str = "mt_bench"):
        super().__init__(path, judge)
        self.name = name

    def problem(self, row: Row) -> Problem:
        messages = row.values.get("messages")
        if "turns" not in row.values and isinstance(messages, list):
            users = [turn for turn in messages if isinstance(turn, dict) and turn.get("role") == "user"]
            row = Row(row.values | {"turns": [turn.get("content") for turn in users]}, row.where)
        prompt = refuse_placeholder(row.text("turns", "prompt"), row.where)
        return Problem(prompt, None, row.values | {"category": row.text("category")})
