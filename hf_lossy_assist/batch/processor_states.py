"""What logits processors remember between their calls, along a text whose drafted end may be rejected.

`generate` calls a processor once a token, in order. A block calls it about drafted tokens, too, and first with the draft's scores.
So each place of a text has a snapshot of what the processors remember when they come to it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from transformers import LogitsProcessor

from .processor_kinds import names, way_out
from .snapshots import Snapshot


class RaisedAhead(Exception):
    """A processor has raised at a drafted place; `__cause__` is what."""


class NotFollowed(ValueError):
    """A refusal before the first token of a text, of processors that remember what they did before the call: another one may begin with them."""


def first_snapshots(*groups: Sequence[LogitsProcessor]) -> list[Snapshot]:
    """Return what processors remember before their first call. Raises `NotFollowed` for what cannot be put back."""
    try:
        return [Snapshot(list(processors)) for processors in groups]
    except ValueError as error:
        raise NotFollowed(*error.args) from error.__cause__


class TextState:
    """Snapshots of the processors of one text at each of its places; put back to the decided text when a draft is rejected."""

    def __init__(self, processors: Sequence[LogitsProcessor], seeded: bool):
        """`seeded`: nothing but processors draws Torch's global random numbers, so these are put back, too."""
        self.processors, self.seeded = list(processors), seeded
        self.draws = False  # whether a processor has drawn some
        self.among_others = False  # texts of other calls are written beside this one, with processors of their own
        self.place: int | None = None  # the first one whose token is open: the number of tokens before it
        self.states: list[tuple[Snapshot, bytes]] = []  # on the way to that place, and to each behind it
        self.live: Snapshot | None = None  # what they remember now; None: a processor has raised in the middle
        self.raised: tuple[int, Exception] | None = None  # at a drafted place, where `generate` may never come

    def begin_among_others(self, holders: dict[int, Any]) -> None:
        """Take what the processors remember when they are made. `holders`, by their id: what holds uncopied state of other texts' processors."""
        self.among_others, self.live = True, Snapshot(self.processors)
        found = {id(part.thing): part.thing for part in self.live.holders() if part.thing is not self.processors}
        if not found.keys().isdisjoint(holders):
            self.refuse("shares what it remembers with another text's")
        holders |= found

    def reaches(self, place: int) -> bool:
        """Return whether `place` can be entered: no processor has raised before it."""
        return self.place is None or place - self.place < len(self.states)

    @contextmanager
    def at(self, place: int, everyone: bool) -> Iterator[None]:
        """Let the processors remember what they did on the way to `place`. Places are entered in order, from the first open one."""
        if self.among_others and self.live is not None and not (self.live.copies or self.live.unchanged()):
            self.refuse("shares what it remembers with another text's")
        if self.place is None:
            self.live = self.live or first_snapshots(self.processors)[0]
            self.place = place
            self.states = [(self.live, random_numbers(self.seeded))]
        ahead = place - self.place
        if ahead == 0:
            self.raised = None
        state, numbers = self.states[ahead]
        del self.states[ahead + 1 :]
        self._restore(state)
        if self.draws:
            torch.set_rng_state(torch.frombuffer(bytearray(numbers), dtype=torch.uint8))
        before = random_numbers(self.seeded)
        try:
            yield
        except Exception as error:
            self.live = None
            if ahead:
                self.raised = place, error
                raise RaisedAhead from error
            raise
        after = random_numbers(self.seeded)
        self.draws |= after != before
        if self.draws and self.among_others:
            self.refuse("draws Torch's random numbers, which other texts draw, too")
        self.live = state if state.unchanged() else Snapshot(self.processors, state)
        self.states.append((self.live, after))

    def commit(self, count: int) -> None:
        """Decide about `count` tokens more. Raises what a processor raised about one of them.

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

    def refuse(self, what: str) -> NoReturn:
        """Raise a `ValueError` about what the processors do."""
        raise ValueError(f"logits_processor: {names(self.processors)} {what}: {way_out(self.processors)}")

    def settle(self) -> None:
        """Leave the processors with what they remember of the decided text, as `generate` does."""
        if self.states:
            self._restore(self.states[0][0])

    def _restore(self, state: Snapshot) -> None:
        if self.live is not state:
            state.restore()
            self.live = state


class SharedState:
    """Snapshots of processors that serve several texts, and may remember only what their first call, about all of them, leaves behind."""

    def __init__(self, processors: Sequence[LogitsProcessor], seeded: bool, from_first_call: bool):
        """`from_first_call`: the texts begin together, so their first call is the one that `generate` makes."""
        self.processors, self.seeded, self.from_first_call = list(processors), seeded, from_first_call
        self.begin: int | None = None
        self.decided = False  # about a token
        self.before: list[Snapshot] = []  # of each processor: before its first call
        self.now: list[Snapshot] = []  # and what it may remember

    @contextmanager
    def at(self, place: int, everyone: bool) -> Iterator[None]:
        """Ask the processors about `place`; `everyone`: about all texts. Raises: `ValueError`, one line, if one remembers that."""
        if self.begin is None:
            self.now = self.before = first_snapshots(*([processor] for processor in self.processors))
            self.begin = place
        first = self.from_first_call and everyone and place == self.begin
        if first and self.now is not self.before:
            for state in self.before:
                state.restore()
            self.now = self.before
        numbers = random_numbers(self.seeded)
        try:
            yield
        except Exception as error:
            # A grammar that was fed the tokens of several texts, or an error that its caller must hear of.
            if isinstance(error, AssertionError) or not all(state.unchanged() for state in self.now):
                self.refuse(f"raised {error!r}")
            raise
        if numbers != random_numbers(self.seeded):
            raise ValueError(
                f"logits_processor: {names(self.processors)} draws Torch's random numbers, for several texts in another order than `generate`: "
                "give it a torch.Generator, or pass prompts one by one"
            )
        changed = [state for state in self.now if not state.unchanged()]
        if changed and not first:
            for state in self.before:
                state.restore()
            blamed, kind = [state.processors[0] for state in changed], ValueError if self.decided else NotFollowed
            self.refuse("remembers something from token to token", blamed, kind)
        self.now = [Snapshot(state.processors, state) if state in changed else state for state in self.now]

    def reaches(self, place: int) -> bool:
        """Return that any place can be asked about."""
        return True

    def commit(self, count: int) -> None:
        """Decide about tokens: nothing goes back to before the first call any more."""
        self.decided = True

    def settle(self) -> None:
        """Do nothing: later calls leave nothing behind."""

    def refuse(
        self, what: str, processors: Sequence[LogitsProcessor] = (), kind: type[ValueError] = ValueError
    ) -> NoReturn:
        """Raise a `ValueError` about what the processors do."""
        blamed = processors or self.processors
        other = "make one for each row, as generate_many does with logits_processor=a function of a prompt's token ids, or pass prompts one by one"
        raise kind(
            f"logits_processor: {names(blamed)} {what}, and one object serves several texts: {way_out(blamed, other)}"
        )


def random_numbers(read: bool) -> bytes:
    """Return the state of Torch's global random numbers, if it is to be read, as bytes: they are fast to compare."""
    return torch.get_rng_state().numpy().tobytes() if read else b""
