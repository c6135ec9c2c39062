"""How good texts are where no answer is right or wrong: ROUGE against a reference, and a judge model's wins and ties.

Both are what SPRINTER (Zhong et al. 2025, section 4, huggingface.co/papers/2502.04557) measures completions by. Nothing here runs a
model of ours: the texts are those that a comparison wrote.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..stats.intervals import Estimate, mean, wilson
from ..tasks.answers import Problem, squeeze
from ..tasks.judging import QATask
from ..tasks.rouge import Rouge, rouge
from .measuring import Answer


REFERENCE = "reference"  # the entry of a problem's `extra`


@dataclass(frozen=True)
class Quality:
    """One arm at one batch size.

    Args:
        rouge: means by name, with Student's intervals over the prompts; empty where no problem has a reference.
        wins, ties, losses: beside the other arm's texts on the same prompts, by the judge in both orders; equal texts are ties, and
            unreadable ones, to which the judge gave no verdict, are none of the three.
        win_tie: (wins + ties) ÷ all judged, with Wilson's interval; None without a judge.
    """

    arm: str
    batch_size: int
    prompts: int
    rouge: dict[str, Estimate]
    wins: int = 0
    ties: int = 0
    losses: int = 0
    unreadable: int = 0
    win_tie: Estimate | None = None

    def to_dict(self) -> dict[str, Any]:
        """One flat row, in plain numbers."""
        row: dict[str, Any] = {name: value for name, value in vars(self).items() if name not in ("rouge", "win_tie")}
        for name, figure in [*self.rouge.items(), ("win_tie", self.win_tie)]:
            value, low, high = (None, None, None) if figure is None else figure
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
        return row


def qualities(
    answers: Sequence[Answer], problems: Sequence[Problem], *, judge: QATask | None = None, against: str | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> list[Quality]:  # fmt: skip
    """Of every arm at every batch size, in the order in which they first wrote.

    Args:
        problems: what the prompts are, by their places.
        judge: a task with a judge; `against`: the arm whose texts the others' are compared with.
        tell: called behind each pair that was judged.

    Raises: `ValueError`, one line, for an arm that wrote nothing.
    """
    by: defaultdict[tuple[str, int], dict[int, Answer]] = defaultdict(dict)
    for answer in answers:
        by[answer.arm, answer.batch_size][answer.prompt] = answer
    arms = list(dict.fromkeys(arm for arm, _ in by))
    if judge is not None and against not in arms:
        raise ValueError(f"against: expected an arm that wrote these texts ({', '.join(arms)}), got {against}")
    found = []
    for (arm, size), its in by.items():
        scores = [rouge_of(problems[place], answer) for place, answer in its.items()]
        known = [score for score in scores if score is not None]
        means = {name: mean([getattr(score, name) for score in known]) for name in Rouge._fields} if known else {}
        beside = by.get((str(against), size), {})
        if judge is None or arm == against or not beside:
            found.append(Quality(arm, size, len(its), means))
            continue
        gains = []
        for place, answer in its.items():
            gains.append(versus(judge, problems[place], beside[place], answer))
            tell(arm)
        found.append(_judged(arm, size, means, gains))
    return found


def rouge_of(problem: Problem, answer: Answer) -> Rouge | None:
    """ROUGE of an answer against the problem's reference; None where there is none."""
    reference = problem.extra.get(REFERENCE)
    return rouge(reference, answer.text) if isinstance(reference, str) else None


def versus(judge: QATask, problem: Problem, other: Answer, answer: Answer) -> int | None:
    """1 where `answer` is the better text, −1 where `other` is, 0 for a tie; None where the judge gives no verdict."""
    if squeeze(other.text) == squeeze(answer.text):
        return 0
    return judge.versus(problem.prompt, other.text, answer.text)


def _judged(arm: str, size: int, means: dict[str, Estimate], gains: Sequence[int | None]) -> Quality:
    wins, ties, losses = (sum(gain == side for gain in gains) for side in (1, 0, -1))
    read = wins + ties + losses
    share = wilson(wins + ties, read) if read else None
    return Quality(arm, size, len(gains), means, wins, ties, losses, len(gains) - read, share)
