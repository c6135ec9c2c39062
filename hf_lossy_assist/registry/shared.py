"""Settings that every copy shares: what Transformers does to a generation config must not double the models that a policy holds."""

from typing import TypeVar


S = TypeVar("S", bound="SharedByCopies")


class SharedByCopies:
    """The base of policies and their parts, which are frozen: a deep copy is the object itself, with the same companion and heads.

    Transformers deep-copies a generation config several times in every call, and a policy may stand in one. Pickling makes a new object.
    """

    def __deepcopy__(self: S, memo: dict[int, object]) -> S:
        return self
