"""Measure the quality of texts without right answers: ROUGE against reference texts, and wins and ties by a judge model.

SPRINTER (Zhong et al. 2025, section 4, huggingface.co/papers/2502.04557) evaluates completions by both. The texts are those that a comparison
wrote; apart from the judge no model is run.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..stats.intervals import Estimate, mean, wilson
from ..tasks.base import Problem, squeeze_blanks
from ..tasks.qa import QATask, Rouge, compute_rouge
from .writer import ArmOutput


TASK = "task"  # name of a task's reference texts; any other reference is an arm
REFERENCE = "reference"  # the entry of a problem's `extra` with a reference text


@dataclass(frozen=True)
class Quality:
    """Comparison of one arm's texts at one batch size with one reference.

    Args:
        reference: `TASK`, or the arm whose texts on the same prompts are the reference.
        rouge: means by name, with Student's intervals over the prompts; empty if no prompt has a reference text.
        wins, ties, losses: against the reference's texts, judged in both orders; equal texts are ties. unreadable: pairs without a
            verdict, which count as none of the three.
        win_tie: (wins + ties) ÷ all judged, with Wilson's interval; None without a judge.
    """

    arm: str
    batch_size: int
    reference: str
    prompts: int
    rouge: dict[str, Estimate]
    wins: int = 0
    ties: int = 0
    losses: int = 0
    unreadable: int = 0
    win_tie: Estimate | None = None

    def to_dict(self) -> dict[str, object]:
        """Return one flat row of plain numbers."""
        row: dict[str, object] = {
            name: value for name, value in vars(self).items() if name not in ("rouge", "win_tie")
        }
        for name, figure in [*self.rouge.items(), ("win_tie", self.win_tie)]:
            value, low, high = (None, None, None) if figure is None else figure
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
        return row


def check_references(references: Sequence[str], arms: Collection[str], problems: Sequence[Problem]) -> None:
    """Refuse a reference that is neither an arm nor `TASK` with reference texts. Raises: `ValueError`, one line."""
    for name in references:
        if name == TASK and not any(isinstance(problem.extra.get(REFERENCE), str) for problem in problems):
            raise ValueError(
                "--reference task: these prompts come with no reference texts: pass --task lm1b, wikitext or demo, or an arm's name"
            )
        if name != TASK and name not in arms:
            raise ValueError(f"--reference: expected task or an arm ({', '.join(arms)}), got {name}")


def compute_quality(
    answers: Sequence[ArmOutput],
    prompts: Sequence[str],
    references: Sequence[str],
    *,
    problems: Sequence[Problem] = (),
    judge: QATask | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> list[Quality]:
    """Compare every arm's texts with each reference, at every batch size, in the order of the arms' first outputs.

    Args:
        prompts, problems: by index; problems may be empty.
        references: names accepted by `check_references`.
        judge: a task with a judge, which compares texts of two arms. tell: called after each judged pair.
    """
    by: defaultdict[tuple[str, int], dict[int, ArmOutput]] = defaultdict(dict)
    for answer in answers:
        by[answer.arm, answer.batch_size][answer.prompt] = answer
    found = []
    for reference in references:
        for (arm, size), texts in by.items():
            beside = by.get((reference, size), {})
            if arm == reference or (reference != TASK and not beside):
                continue
            scores = []
            for place, answer in texts.items():
                text = get_reference(problems[place]) if reference == TASK else beside[place].text
                scores += [] if text is None else [compute_rouge(text, answer.text)]
            means = (
                {name: mean([getattr(score, name) for score in scores]) for name in Rouge._fields} if scores else {}
            )
            gains: list[int | None] = []
            if judge is not None and reference != TASK:
                for place, answer in texts.items():
                    gains.append(judge_pair(judge, prompts[place], beside[place], answer))
                    tell(arm)
            wins, ties, losses = (sum(gain == side for gain in gains) for side in (1, 0, -1))
            judged = wins + ties + losses
            share = wilson(wins + ties, judged) if judged else None
            found.append(
                Quality(arm, size, reference, len(texts), means, wins, ties, losses, len(gains) - judged, share)
            )
    return found


def get_reference(problem: Problem) -> str | None:
    """Return the problem's reference text, or None."""
    text = problem.extra.get(REFERENCE)
    return text if isinstance(text, str) else None


def judge_pair(judge: QATask, prompt: str, other: ArmOutput, answer: ArmOutput) -> int | None:
    """Return 1 if `answer` is the better text, −1 if `other` is, 0 for a tie; None if the judge gives no verdict."""
    if squeeze_blanks(other.text) == squeeze_blanks(answer.text):
        return 0
    return judge.versus(prompt, other.text, answer.text)
