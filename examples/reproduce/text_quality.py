"""Figures of texts without right answers: ROUGE-L against reference texts, and wins and ties by a judge model.

SPRINTER (Zhong et al. 2025, section 4, huggingface.co/papers/2502.04557) measures completions by both. Needs `pip install rouge-score`.
"""

import os
import re

from openai import OpenAI
from rouge_score.rouge_scorer import RougeScorer

from hf_lossy_assist.evaluation.writer import ArmOutput
from hf_lossy_assist.tasks.base import Problem, squeeze_blanks


REFERENCE = "reference"  # the entry of a problem's `extra` with a reference text
SCORER = RougeScorer(["rougeL"], use_stemmer=True)

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
ATTEMPTS = 3  # of a request until the reply holds a verdict


def compute_rouge(problem: Problem, text: str) -> float:
    """Return ROUGE-L of `text` against the problem's reference text, from 0 to 1; 0 without one."""
    reference = problem.extra.get(REFERENCE)
    return float(SCORER.score(reference, text)["rougeL"].fmeasure) if isinstance(reference, str) else 0.0


class Judge:
    """A model behind an OpenAI-compatible server that compares two texts (after Arena-Hard, Li et al. 2024)."""

    def __init__(self, url: str, model: str):
        key = os.environ.get("OPENAI_API_KEY", "none")  # local servers need none
        self.client, self.model = OpenAI(base_url=url, api_key=key, max_retries=5), model

    def compare(self, prompt: str, other: ArmOutput, answer: ArmOutput) -> int | None:
        """Return 1 if `answer` is the better text, −1 if `other` is, 0 for a tie; None if there is no verdict.

        The judge sees them in both orders: a text is better if one order says so and the other does not say the opposite.
        """
        if squeeze_blanks(other.text) == squeeze_blanks(answer.text):
            return 0
        gains = [self._ask(prompt, other.text, answer.text), self._ask(prompt, answer.text, other.text)]
        if gains[0] is None or gains[1] is None:
            return None
        low, high = sorted((gains[0], -gains[1]))  # how much better `answer` is, in either order
        return -1 if low < 0 and high <= 0 else 1 if low >= 0 and high > 0 else 0

    def _ask(self, request: str, a: str, b: str) -> int | None:
        """Return how much better `b` is than `a` by the last verdict in the reply, or None."""
        pair = f"# The request\n\n{request}\n\n# Reply A\n\n{a}\n\n# Reply B\n\n{b}"
        for attempt in range(ATTEMPTS):
            reply = self.client.chat.completions.create(
                model=self.model,
                messages=[{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": pair}],
                max_tokens=1024,
                temperature=float(attempt > 0),
            )
            if verdicts := _VERDICT.findall(reply.choices[0].message.content or ""):
                return VERDICTS[verdicts[-1]]
        return None
