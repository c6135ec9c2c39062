"""What logits processors remember between their calls, along a text whose drafted end may be rejected.

`generate` calls a processor once a token, in order. A block calls it about drafted tokens, too, and first with the draft's scores.
So each place of a text has a snapshot of what the processors remember when they come to it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from transformers.generation import PrefixConstrainedLogitsProcessor

from .snapshots import CannotRestore, Snapshot


WAY_OUT = "make it a function of input_ids and scores, or leave lossy_policy out"


class RaisedAhead(Exception):
    """A processor has raised at a drafted place; `__cause__` is what."""


class TextState:
    """What the processors of one text remember at each of its places; put back to the decided text when a draft is rejected."""

    def __init__(self, processors: Sequence[Any], seeded: bool):
        """`seeded`: nothing but processors draws Torch's global random numbers, so these are put back, too."""
        self.processors, self.seeded = list(processors), seeded
        self.draws = False  # whether a processor has drawn some
        self.among_others = False  # texts of other calls are written beside this one, with processors of their own
        self.place: int | None = None  # the first one whose token is open: the number of tokens before it
        self.states: list[tuple[Snapshot, bytes]] = []  # on the way to that place, and to each behind it
        self.live: Snapshot | None = None  # what they remember now; None: a processor has raised in the middle
        self.raised: tuple[int, Exception] | None = (
            None  # the drafted place at which one has, for `generate` may never come there
        )

    def begin_among_others(self, holders: dict[int, Any]) -> None:
        """Take what the processors remember when they are made. `holders`, by their id: what holds uncopied state of other texts' processors."""
        self.among_others, self.live = True, self._snapshot(None)
        found = {id(part.thing): part.thing for part in self.live.holders() if part.thing is not self.processors}
        if not found.keys().isdisjoint(holders):
            self.refuse("shares what it remembers with another text's")
        holders |= found

    def reaches(self, place: int) -> bool:
        """Return whether `place` can be entered: no processor has raised before it."""
        return self.place is None or place - self.place < len(self.states)

    @contextmanager
    def at(self, place: int, everyone: bool) -> Iterator[None]:
        """Within, the processors remember what they did on the way to `place`. Places are entered in order, from the first open one.

        Raises: `ValueError`, one line, for what cannot be copied.
        """
        if self.among_others and self.live is not None and not (self.live.copies or self._unchanged(self.live)):
            self.refuse("shares what it remembers with another text's")
        if self.place is None:
            self.place, self.live = place, self.live or self._snapshot(None)
            self.states = [(self.live, self._random_numbers())]
        ahead = place - self.place
        assert 0 <= ahead < len(self.states), "places are entered in order"
        if ahead == 0:
            self.raised = None
        state, numbers = self.states[ahead]
        del self.states[ahead + 1 :]
        self._restore(state)
        if self.draws:
            torch.set_rng_state(torch.frombuffer(bytearray(numbers), dtype=torch.uint8))
        before = self._random_numbers()
        try:
            yield
        except Exception as error:
            self.live = None
            if ahead:
                self.raised = place, error
                raise RaisedAhead from error
            raise
        after = self._random_numbers()
        self.draws |= after != before
        if self.draws and self.among_others:
            self.refuse("draws Torch's random numbers, which other texts draw, too")
        self.live = state if self._unchanged(state) else self._snapshot(state)
        self.states.append((self.live, after))

    def commit(self, count: int) -> None:
        """`count` tokens more are decided. Raises what a processor raised about one of them.

        Raises: `ValueError` where a token lies behind one that a processor forbade, as what it would remember is unknown.
        """
        if self.place is None:
            return
        if self.raised is not None and self.place + count > self.raised[0]:
            raise self.raised[1]
        if count >= len(self.states) and any(state is not self.states[0][0] for state, _ in self.states):
            self.refuse("forbids a token that the policy accepted, and remembers something from token to token")
        self.states = self.states[min(count, len(self.states) - 1) :]
        self.place += count

    def refuse(self, what: str) -> None:
        """Raise a `ValueError` about what the processors do."""
        raise ValueError(f"logits_processor: {_names(self.processors)} {what}: {WAY_OUT}")

    def settle(self) -> None:
        """Leave the processors with what they remember of the decided text, as `generate` does."""
        if self.states:
            self._restore(self.states[0][0])

    def _random_numbers(self) -> bytes:
        return random_numbers() if self.seeded else b""

    def _restore(self, state: Snapshot) -> None:
        if self.live is not state:
            with _named(self.processors):
                state.restore()
            self.live = state

    def _unchanged(self, state: Snapshot) -> bool:
        with _named(self.processors):
            return state.unchanged()

    def _snapshot(self, before: Snapshot | None) -> Snapshot:
        with _named(self.processors):
            return Snapshot(self.processors, before)


class SharedState:
    """What processors remember that serve several texts: only what their first call, about all of them, leaves behind."""

    def __init__(self, processors: Sequence[Any], seeded: bool, from_first_call: bool):
        """`from_first_call`: the texts begin together, so their first call is the one that `generate` makes."""
        self.processors, self.seeded, self.from_first_call = list(processors), seeded, from_first_call
        self.begin: int | None = None
        self.before: list[Snapshot] = []  # of each processor: before its first call
        self.now: list[Snapshot] = []  # and what it may remember

    @contextmanager
    def at(self, place: int, everyone: bool) -> Iterator[None]:
        """Within, the processors may be asked about `place`; `everyone`: about all texts. Raises: `ValueError`, one line, if one remembers that."""
        if self.begin is None:
            self.begin = place
            self.now = self.before = [self._snapshot(processor, None) for processor in self.processors]
        first = self.from_first_call and everyone and place == self.begin
        if first and self.now is not self.before:
            for state in self.before:
                state.restore()
            self.now = self.before
        numbers = random_numbers() if self.seeded else b""
        try:
            yield
        except Exception as error:
            # A grammar that was fed the tokens of several texts, or an error that its caller must hear of.
            with _named(self.processors):
                unchanged = all(state.unchanged() for state in self.now)
            if isinstance(error, AssertionError) or not unchanged:
                self.refuse(f"raised {error!r}")
            raise
        if self.seeded and numbers != random_numbers():
            raise ValueError(
                f"logits_processor: {_names(self.processors)} draws Torch's random numbers, for several texts in another order than `generate`: "
                "give it a torch.Generator, or pass prompts one by one"
            )
        pairs = list(zip(self.processors, self.now, strict=True))
        with _named(self.processors):
            changed = [processor for processor, state in pairs if not state.unchanged()]
        if first:
            self.now = [self._snapshot(p, state) if p in changed else state for p, state in pairs]
        elif changed:
            raise ValueError(_one_each(changed, "remembers something from token to token"))

    def reaches(self, place: int) -> bool:
        """Return that any place can be asked about."""
        return True

    def commit(self, count: int) -> None:
        """Do nothing: later calls leave nothing behind."""

    def refuse(self, what: str) -> None:
        """Raise a `ValueError` about what the processors do."""
        raise ValueError(_one_each(self.processors, what))

    def settle(self) -> None:
        """Do nothing: later calls leave nothing behind."""

    def _snapshot(self, processor: Any, before: Snapshot | None) -> Snapshot:
        with _named([processor]):
            return Snapshot([processor], before)


def random_numbers() -> bytes:
    """Return the state of Torch's global random numbers, which are fast to compare as bytes."""
    return torch.get_rng_state().numpy().tobytes()


def _one_each(processors: Sequence[Any], what: str) -> str:
    return (
        f"logits_processor: {_names(processors)} {what}, and one object serves several texts: make one for each row, as "
        "generate_many does with logits_processor=a function of a prompt's token ids, or pass prompts one by one"
    )


def _names(processors: Sequence[Any]) -> str:
    return " or ".join(dict.fromkeys(_name(p) for p in processors))


def _name(processor: Any) -> str:
    if type(processor) is PrefixConstrainedLogitsProcessor:
        return "prefix_allowed_tokens_fn"
    name = getattr(type(processor), "__name__", "")
    return processor.__name__ if isinstance(processor, FunctionType) else name


@contextmanager
def _named(processors: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    except CannotRestore as error:
        raise ValueError(
            f"logits_processor: {_names(processors)} {error}, so a rejected draft cannot be forgotten: {WAY_OUT}"
        ) from error
