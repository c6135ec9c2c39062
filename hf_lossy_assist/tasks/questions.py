"""Questions of several categories, judged by a model: MT-bench (Zheng et al. 2023) and Spec-Bench (Xia et al. 2024)."""

from .answers import Problem, Row
from .judging import QATask


class TurnsTask(QATask):
    """JSON lines with `turns` (or `prompt`), of which the first is asked, and `category`, which the problem's `extra` keeps.

    `read_prompts` reads the same files for what needs prompts alone.
    """

    def problem(self, row: Row) -> Problem:
        prompt = row.text("turns", "prompt")
        return Problem(prompt, None, row.values | {"category": row.text("category")})


class MTBench(TurnsTask):
    """MT-bench's 80 questions of 8 categories; of the two turns the first."""

    name = "mt_bench"


class SpecBench(TurnsTask):
    """Spec-Bench's 480 questions: MT-bench's, translation, summarisation, question answering, GSM8K and retrieval."""

    name = "spec_bench"
