"""What `generate_many` returns: texts as they end, and the statistics of all of them."""

from dataclasses import dataclass, replace

from ..batch.logprobs import TokenLogprobs
from ..stats.clock import Clock, estimate_in_flight
from ..stats.speculation import SpeculationStats


LATEST = 4096  # forwards that the estimate of the target alone looks at


@dataclass(frozen=True)
class Result:
    """One finished text.

    Args:
        index: which prompt it is of, from 0.
        token_ids: new tokens, the end token with them.
        text: what they add to the prompt's text, its first space with it, without special tokens; None where no tokenizer was given.
        speculation (`SpeculationStats`): of this text alone; seconds of forwards, which texts share, are not in it.
        seconds: from the moment that it was given a place until it ended.
        logprobs: of each of `token_ids`, where they were asked for.
    """

    index: int
    token_ids: list[int]
    text: str | None
    speculation: SpeculationStats
    seconds: float
    logprobs: list[TokenLogprobs] | None = None


class FinishedTexts:
    """Statistics of all texts that have ended, in as much memory however many they are."""

    def __init__(self, clock: Clock):
        """`clock`: of the rounds in which texts are written together."""
        self.clock = clock
        self.together: SpeculationStats | None = None
        self.apart: SpeculationStats | None = None

    def add(self, text: SpeculationStats, apart: bool = False) -> None:
        """Count a text; `apart`: it was written alone, and has seconds of its own."""
        if apart:
            self.apart = _summed(self.apart, text)
        else:
            self.together = _summed(self.together, text)
            self.clock.seconds()  # on a CUDA device: what was measured since the last text
            del self.clock.reads[:-LATEST]

    def stats(self) -> SpeculationStats | None:
        """Return those of all texts, with the seconds of all forwards so far; None: no text has ended."""
        together = self.together
        if together is not None:
            seconds = self.clock.seconds()
            alone = estimate_in_flight(self.clock.reads, together.rows[0].num_new_tokens, seconds.get("prefill", 0.0))
            together = replace(together, forwards=dict(self.clock.forwards), seconds=seconds, alone=alone)
        return _summed(together, self.apart)


def _summed(*calls: SpeculationStats | None) -> SpeculationStats | None:
    """Return their sum as one row, which does not know the source of each token."""
    known = [call for call in calls if call is not None]
    if not known:
        return None
    out = SpeculationStats.merge(known)
    return replace(out, rows=[out.total()])
