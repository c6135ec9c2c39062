"""Figures of texts without right answers: ROUGE-L against reference texts, and wins and ties by a judge model.

SPRINTER (Zhong et al. 2025, section 4, huggingface.co/papers/2502.04557) measures completions by both. Needs `pip install rouge-score`.
"""

from rouge_score.rouge_scorer import RougeScorer

from hf_lossy_assist.evaluation.writer import ArmOutput
from hf_lossy_assist.tasks.base import Problem, squeeze_blanks
from hf_lossy_assist.tasks.qa import QATask


REFERENCE = "reference"  # the entry of a problem's `extra` with a reference text
SCORER = RougeScorer(["rougeL"], use_stemmer=True)


def compute_rouge(problem: Problem, text: str) -> float:
    """Return ROUGE-L of `text` against the problem's reference text, from 0 to 1; 0 without one."""
    reference = problem.extra.get(REFERENCE)
    return float(SCORER.score(reference, text)["rougeL"].fmeasure) if isinstance(reference, str) else 0.0


def judge_pair(judge: QATask, prompt: str, other: ArmOutput, answer: ArmOutput) -> int | None:
    """Return 1 if `answer` is the better text, −1 if `other` is, 0 for a tie; None if the judge gives no verdict."""
    if squeeze_blanks(other.text) == squeeze_blanks(answer.text):
        return 0
    return judge.versus(prompt, other.text, answer.text)
