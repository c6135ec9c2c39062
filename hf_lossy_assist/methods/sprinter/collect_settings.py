"""What decides every number of a collected dataset: rows, decoding, the states that are kept."""

from dataclasses import asdict, dataclass
from typing import Any

from ...artifacts.conditions import check_sampling, select_sampling
from ...artifacts.features import FeatureSpec
from ...training.dataset import KINDS, REPLACED
from ...validation import (
    LONGEST_DRAFT,
    MOST_FACTOR,
    MOST_NEW_TOKENS,
    MOST_ROWS,
    check_int,
    check_number,
    shown,
)


@dataclass(frozen=True)
class CollectSettings:
    """What decides every number in the dataset. A resumed run must have the same."""

    new_tokens: int = 64  # positions of each row
    lam: float = 1.2  # λ: acceptable is q(x) ≤ λ·p(x); steers the interleaved rows, and fitting may use another
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    batch_size: int = 8  # prompts at a time; each is four rows
    seed: int = 0
    features: FeatureSpec = FeatureSpec()
    mix: float | None = (
        None  # share of the draft's tokens that are replaced, for SpecDec++; None: SPRINTER's four kinds of rows
    )
    # Of a drafter on the target's states: tokens that it is behind in turn, as in a draft of so many, before it is told the target's states again.
    places: int = 1

    def __post_init__(self) -> None:
        check_int("new_tokens", self.new_tokens, 1, MOST_NEW_TOKENS)
        check_int("batch_size", self.batch_size, 1, MOST_ROWS)
        check_int("seed", self.seed, 0)
        check_sampling(self)
        check_number("lambda", self.lam, 0.0, MOST_FACTOR)
        check_int("places", self.places, 1, LONGEST_DRAFT)
        if self.mix is not None:
            check_number("mix", self.mix, 0.0, 1.0)
        if not isinstance(self.features, FeatureSpec):
            raise TypeError(f"features: expected a FeatureSpec, got {shown(self.features)}")
        method, position = ("SPRINTER", "predicting") if self.mix is None else ("SpecDec++", "token")
        if (self.features.model, self.features.position) != ("draft", position):
            wanted = "that predicts a token" if self.mix is None else "that encodes a token"
            raise ValueError(f"a {method} head reads the draft's state {wanted}, not the {self.features}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the rows of a prompt go on with."""
        return KINDS if self.mix is None else (REPLACED,)

    def decoding(self) -> dict[str, Any]:
        """The settings of the distributions p and q, as `generate` names them."""
        return select_sampling(asdict(self))


DEFAULTS = CollectSettings()
