"""Settings for creating and training drafters: the options of `hf-lossy fit eagle3` and `fit dspark`."""

from dataclasses import dataclass
from typing import Annotated

from ..setting_fields import check_bounds
from ..validation import MOST, shown


LIKELY = 32
MARKOV = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DrafterFitSettings:
    """Settings of an EAGLE-3 drafter. Raises: `ValueError` or `TypeError`, one line, for numbers beyond their bounds."""

    layers: Annotated[int, (1, 16), "decoder layers"] = 1
    vocabulary: Annotated[
        int | None, (2, MOST), "tokens that it can propose: the target's most frequent (default: all)"
    ] = None
    intermediate_size: Annotated[int | None, (1, 2**20), "width of its MLP (default: the target's)"] = None
    steps: Annotated[int, (1, 16), "tokens of the drafts that it is trained on"] = 5
    epochs: Annotated[int, (1, MOST), "times that all texts are read"] = 4
    batch_size: Annotated[int, (1, MOST), "texts a step"] = 8
    learning_rate: Annotated[float, (1e-12, 1.0), "the highest; it rises at first and falls to a tenth"] = 3e-4
    longest: Annotated[int, (4, MOST), "tokens of a text that are used"] = 1024
    held_out: Annotated[float, (0.01, 0.5), "share of the texts that the figures are made on"] = 0.05
    likely: Annotated[int, (1, 1024), "likeliest tokens at each position whose probabilities it learns"] = LIKELY
    save_every: Annotated[int, (1, MOST), "steps between two checkpoints"] = 100
    seed: Annotated[int, (0, MOST), "random seed, of the held-out split and of training"] = 0

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class DSparkFitSettings(DrafterFitSettings):
    """Settings of a DSpark drafter; `steps` is the tokens of a block."""

    steps: Annotated[int, (2, 16), "tokens of a block"] = 5
    rank: Annotated[int, (1, 2**13), "width of the Markov head"] = 256
    markov: Annotated[str, f"kind of the Markov head: {', '.join(MARKOV)}"] = "vanilla"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov not in MARKOV:
            raise ValueError(f"markov: expected one of {', '.join(MARKOV)}, got {shown(self.markov)}")
