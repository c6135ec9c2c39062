"""Drafting that loses in a batch switches itself off: rows that agree more and less and end one after another, on a clock made by hand."""

import itertools
from dataclasses import dataclass, field

from hf_lossy_assist import Constant, Fallback
from hf_lossy_assist.stops.fallback import FallbackRun


GAMMA = 5


@dataclass
class Batch:
    """Rows that write `length[b]` tokens each, of which `agrees[b]` drafted ones a round are accepted.

    A round takes `fixed`, `step` for each token drafted one after another, and `token` for each token that the target reads. `sent`: how many of a
    row's drafted tokens a filter lets pass.
    """

    length: list[int]
    agrees: list[int]
    fixed: float = 1.0
    step: float = 0.1
    token: float = 0.0
    sent: int = GAMMA
    clock: float = 0.0
    rounds: str = ""
    written: list[int] = field(default_factory=list)

    def write(self, stop) -> "Batch":
        self.written, self.clock, self.rounds = [0] * len(self.length), 0.0, ""
        run = stop.start(len(self.length))
        if isinstance(stop, Fallback):
            run = FallbackRun(stop, len(self.length), now=lambda: self.clock)
        while rows := [b for b, length in enumerate(self.length) if self.written[b] < length]:
            limits = run.begin_round(rows)
            sent = [min(limit, self.sent) for limit in limits]
            accepted = [min(self.agrees[b], n) for b, n in zip(rows, sent, strict=True)]
            self.clock += self.fixed + self.step * max(limits) + self.token * (len(rows) + sum(sent))
            run.observe(rows, sent, accepted)
            for b, n in zip(rows, accepted, strict=True):
                self.written[b] += n + 1
            self.rounds += "D" if max(limits) else "A"
        return self

    def alone(self) -> float:
        return sum(
            self.fixed + self.token * sum(length > i for length in self.length) for i in range(max(self.length))
        )


# Every token costs: 8 rows of 6 tokens are dear, one row is not.
COSTS = {"fixed": 1.0, "step": 0.2, "token": 0.25}


def test_a_batch_that_loses_falls_back():
    length, stops = [200 + 10 * b for b in range(8)], (Constant(GAMMA), Fallback(Constant(GAMMA)))
    for agrees in ([1] * 8, [0, 2, 1, 0, 2, 1, 0, 2], [4, 0, 0, 0, 4, 0, 0, 0]):
        always, careful = (Batch(length, agrees, **COSTS).write(stop) for stop in stops)
        alone = careful.alone()
        assert always.clock > 1.3 * alone, "it is meant to lose"
        assert careful.clock < 1.1 * alone, agrees


def test_what_does_not_pay_for_eight_rows_pays_for_the_last_two():
    """As soon as half of the rows have ended it is tried again, not after 2·wait, 4·wait … rounds of the target alone."""
    batch = Batch([60] * 6 + [200] * 2, [3] * 8, **COSTS).write(Fallback(Constant(GAMMA), wait=64))
    off = batch.rounds.index("AAAA")
    again = batch.rounds.index("DDDD", off)
    assert off < 10 and again <= 60 + 4
    assert set(batch.rounds[again:]) == {"D"}


def test_and_what_still_does_not_is_left_again():
    batch = Batch([40] * 6 + [120] * 2, [0] * 8, **COSTS).write(Fallback(Constant(GAMMA), wait=16))
    assert batch.rounds.count("D") <= 3 + 2 * 3 + 4
    assert batch.clock < 1.25 * batch.alone()


def test_it_never_drafts_for_long_in_vain():
    length = [10 * (b + 1) for b in range(8)]
    for wait, first in itertools.product((1, 2, 32), (1, 3)):
        batch = Batch(length, [0] * 8, **COSTS).write(Fallback(Constant(GAMMA), wait=wait, first=first))
        assert "D" * 5 not in batch.rounds, (wait, first)


def test_a_filter_that_drops_every_draft_is_drafting_all_the_same():
    batch = Batch([120], [5], fixed=1.0, step=0.2, sent=0).write(Fallback(Constant(GAMMA)))
    assert batch.rounds.count("D") < 10 and batch.clock < 1.1 * batch.alone()
