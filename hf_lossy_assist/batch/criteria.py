"""Stopping criteria, called as `generate` calls them: once for each new token, with the whole text."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria

from .callers_code import refuse_state


ONE_EACH = "pass a function of a prompt's token ids that makes one for each, stopping_criteria=lambda ids: […]"
KNOWN = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)  # not subclasses: they may stop elsewhere


def ends_at(
    criteria: Iterable[StoppingCriteria], texts: torch.Tensor, scores: Sequence[torch.Tensor] | None
) -> list[bool]:
    """Call every criterion with `texts` (B, n); return which rows end. `scores`: (B, V) of each new token, or None."""
    over, shown = torch.zeros(len(texts), dtype=torch.bool), None if scores is None else tuple(scores)
    for criterion in criteria:
        # In place: another shape than that of one entry or one for each row is an error.
        over |= torch.as_tensor(criterion(texts, shown)).bool().cpu()
    out: list[bool] = over.tolist()
    return out


class BatchCriteria:
    """The caller's criteria in a call with several rows, called as `generate` does: with all rows, which have as many
    new tokens.

    Rows proceed at different speeds, so a token is judged when every row that goes on has it. A row may be further by
    then.
    """

    def __init__(self, criteria: Sequence[StoppingCriteria], texts: torch.Tensor, pad: int | None):
        """`texts` (B, n): the prompts. `pad`: the token after a row's end; None: rows are continued there."""
        self.criteria, self.texts, self.pad = criteria, texts, pad
        self.step = 0  # new tokens that have been judged
        self.tokens: list[list[int]] = [[] for _ in texts]  # all new tokens
        self.scores: list[torch.Tensor] = []  # (B, V) of each judged token

    def advance(self, ends: list[int | None], scores: Sequence[Sequence[torch.Tensor]] | None) -> None:
        """Judge the tokens that all rows have; lower `ends`, the number of each row's new tokens at its end, None while
        it goes on.

        `scores`: of each row, (1, V) of each token; zeros stand for those after its end.
        """
        while True:
            going = [end is None or end > self.step for end in ends]
            needed = going if self.pad is not None else [True] * len(going)
            short = (need and len(row) <= self.step for need, row in zip(needed, self.tokens, strict=True))
            if not any(going) or any(short):
                return
            column = [row[self.step] if need else self.pad for need, row in zip(needed, self.tokens, strict=True)]
            self.texts = torch.cat([self.texts, torch.tensor(column, device=self.texts.device)[:, None]], dim=1)
            if scores is not None:
                size = next(row[self.step] for row, need in zip(scores, needed, strict=True) if need)
                rows = zip(scores, needed, strict=True)
                self.scores.append(
                    torch.cat([row[self.step] if need else torch.zeros_like(size) for row, need in rows])
                )
            self.step += 1
            for row, over in enumerate(ends_at(self.criteria, self.texts, None if scores is None else self.scores)):
                if going[row] and over:
                    ends[row] = self.step


class SharedCriterion(StoppingCriteria):
    """A caller's criterion for several texts of `generate_many`, which are written side by side."""

    def __init__(self, criterion: StoppingCriteria):
        self.criterion = criterion

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...], **kwargs: object) -> torch.Tensor:
        """Call the criterion. Raises: `ValueError` if that changes what it holds: it would mix the texts."""
        with refuse_state("stopping_criteria", self.criterion, ONE_EACH):
            return self.criterion(input_ids, scores, **kwargs)


@dataclass(frozen=True)
class RowEnds:
    """The end of an inserted row, besides the end tokens of its call.

    Args:
        max_length: tokens of prompt and text.
        clocks: `max_time` criteria.
        others: the remaining criteria, for this row alone.
    """

    max_length: int
    clocks: Sequence[MaxTimeCriteria]
    others: Sequence[StoppingCriteria]

    @classmethod
    def of(cls, criteria: Iterable[StoppingCriteria], max_length: int) -> "RowEnds":
        """Sort the criteria of one text by kind."""
        clocks = [c for c in criteria if type(c) is MaxTimeCriteria]
        return cls(max_length, clocks, [c for c in criteria if type(c) not in KNOWN])

    def begin(self) -> None:
        """Start clocks that are set to start with the row (initial timestamp: infinity)."""
        for clock in self.clocks:
            clock.initial_timestamp = min(clock.initial_timestamp, time.time())


def is_over(clocks: Sequence[MaxTimeCriteria]) -> bool:
    """Return whether one of these criteria is out of time."""
    return any(bool(clock(torch.empty(1, 0), None).any()) for clock in clocks)
