"""What one row of a call counts, round by round."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


SOURCES = ("draft", "draft-lossy", "correction", "bonus")  # what a token's entry in `token_sources` means


class Record(NamedTuple):
    """One row's part in one round: `accepted` by the rule, `taken` tokens committed (accepted + 1, or fewer where the row ended).

    `lossy[i]` is 1 where accepted token i needed the rule, `unchecked[i]` where the rule did not look at it.
    """

    drafted: int
    sent: int
    accepted: int
    lossy: Sequence[int]
    taken: int
    unchecked: Sequence[int] = ()


@dataclass
class RowStats:
    """One row of the batch. Counts are of tokens, except `num_spec_steps` (rounds in which the row took part)."""

    num_new_tokens: int = 0
    num_spec_steps: int = 0
    num_plain_steps: int = 0  # of these: nothing was drafted, the target wrote alone
    num_draft_tokens: int = 0  # sent to the target
    num_dropped_tokens: int = 0  # drafted, but not sent: the verify filter dropped them
    num_accepted_draft_tokens: int = 0  # committed; not what a stop condition cut off behind an accepted token
    num_lossy_accepts: int = 0  # of these: strict acceptance would have rejected them
    num_unchecked_tokens: int = 0  # of the accepted: taken without a look at what the target says of them
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)  # (tokens sent, tokens accepted) → rounds
    lossy_by_position: Counter[int] = field(default_factory=Counter)  # place in the draft (from 0) → lossy accepts
    token_sources: list[int] = field(default_factory=list)  # index into SOURCES, one for each new token

    def record(
        self, drafted: int, sent: int, accepted: int, lossy: Sequence[int], taken: int, unchecked: Sequence[int] = ()
    ) -> None:
        """Add one round; arguments as of `Record`."""
        kept = min(accepted, taken)
        self.num_spec_steps += 1
        self.num_plain_steps += drafted == 0
        self.num_new_tokens += taken
        self.num_draft_tokens += sent
        self.num_dropped_tokens += drafted - sent
        self.num_accepted_draft_tokens += kept
        self.num_unchecked_tokens += sum(unchecked[:kept])
        self.steps[sent, kept] += 1
        for place in range(kept):
            self.num_lossy_accepts += lossy[place]
            self.lossy_by_position[place] += lossy[place]
            self.token_sources.append(lossy[place])
        if taken > accepted:
            self.token_sources.append(3 if accepted == sent else 2)
