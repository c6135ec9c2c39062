"""How an EAGLE-3 drafter is made and trained."""

from dataclasses import dataclass

from ...validation import check_int, check_number, check_positive


@dataclass(frozen=True)
class FitSettings:
    """How a drafter is made and trained.

    Args:
        layers: decoder layers. vocabulary: tokens that it can propose, the target's most frequent ones; None: all.
        intermediate_size: of its MLP; None: the target's.
        steps: length of the chains that it is trained on.
        epochs, batch_size (texts), learning_rate (its highest), longest (tokens of a text that are used).
        held_out: share of the texts that the figures are made on.
        texts: of the others, how many it is trained on, the same first ones for every number; None: all. For what more texts would bring.
        save_every: steps of the optimizer between two checkpoints.
    """

    layers: int = 1
    vocabulary: int | None = None
    intermediate_size: int | None = None
    steps: int = 5
    epochs: int = 4
    batch_size: int = 8
    learning_rate: float = 3e-4
    longest: int = 1024
    held_out: float = 0.05
    texts: int | None = None
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("layers", self.layers, 1, 16)
        if self.vocabulary is not None:
            check_int("vocabulary", self.vocabulary, 2)
        if self.intermediate_size is not None:
            check_int("intermediate_size", self.intermediate_size, 1, 2**20)
        check_int("steps", self.steps, 1, 16)
        if self.texts is not None:
            check_int("texts", self.texts, 1)
        for name in ("epochs", "batch_size", "save_every"):
            check_int(name, getattr(self, name), 1)
        check_int("longest", self.longest, 4)
        check_int("seed", self.seed, 0)
        check_positive("learning_rate", self.learning_rate, 1.0)
        check_number("held_out", self.held_out, 0.01, 0.5)


DEFAULTS = FitSettings()
