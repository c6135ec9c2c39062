"""What decides every label of a mined dataset: lengths, decoding, limits of the search."""

from dataclasses import asdict, dataclass
from typing import Any

from ...artifacts.conditions import check_sampling, select_sampling
from ...validation import LONGEST_DRAFT, MOST_FACTOR, MOST_NEW_TOKENS, check_flag, check_int, check_number


@dataclass(frozen=True)
class MineSettings:
    """What decides every label in the dataset. A resumed run must have the same."""

    max_new_tokens: int = 512  # T_max: of a whole response, whatever is replaced in it
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # of the random state of sampling
    naive: bool = False  # each mismatch of the target's response alone, nothing kept
    max_mismatches: int | None = None  # of a problem; what is cut off is counted
    max_seconds: float | None = None  # of a problem; looked at between two continuations
    places: int = (
        1  # of a drafter on the target's states: tokens of a draft, before it is told the target's states again
    )

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1, MOST_NEW_TOKENS)
        check_int("seed", self.seed, 0, 2**63 - 1)
        check_int("places", self.places, 1, LONGEST_DRAFT)
        check_sampling(self, "leave --do-sample out")
        check_flag("naive", self.naive)
        if self.max_mismatches is not None:
            check_int("max_mismatches", self.max_mismatches, 1)
        if self.max_seconds is not None:
            check_number("max_seconds", self.max_seconds, 0.0, MOST_FACTOR)

    def decoding(self) -> dict[str, Any]:
        """The settings of the models' distributions, as `generate` names them."""
        return select_sampling(asdict(self))


DEFAULTS = MineSettings()
