"""The state of logits processors along a text whose drafted end may be rejected.

`generate` calls a processor once per token, in order. A speculative round also calls it at drafted tokens, so a snapshot of the
processors' state is taken at each position.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from transformers import LogitsProcessor

from .processor_kinds import names, way_out
from .snapshots import Snapshot


class RaisedAhead(Exception):
    """A processor raised at a drafted position; `__cause__` is its exception."""


class NotFollowed(ValueError):
    """A refusal, before the first token, of processors with state from before the call; another call may begin with them."""


def first_snapshots(*groups: Sequence[LogitsProcessor]) -> list[Snapshot]:
    """Take snapshots before the processors' first call. Raises: `NotFollowed` for state that cannot be restored."""
    try:
        return [Snapshot(list(processors)) for processors in groups]
    except ValueError as error:
        raise NotFollowed(*error.args) from error.__cause__


class TextState:
    """Snapshots of one text's processors at each position, restored to the committed text when a draft is rejected."""

    def __init__(self, processors: Sequence[LogitsProcessor], seeded: bool):
        """`seeded`: only processors draw torch's global random numbers, so these are restored, too."""
        self.processors, self.seeded = list(processors), seeded
        self.draws = False  # whether a processor draws random numbers
        self.among_others = False  # whether other calls' texts, with separate processors, are written beside this one
        self.place: int | None = None  # first undecided position: the number of tokens before it
        self.states: list[tuple[Snapshot, bytes]] = []  # before that position, and after each position from it
        self.live: Snapshot | None = None  # current state; None: a processor has raised midway
        self.raised: tuple[int, Exception] | None = None  # at a drafted position, which `generate` may never reach

    def begin_among_others(self, holders: dict[int, Any]) -> None:
        """Snapshot the new processors. `holders`: the objects, by id, that hold uncopied state of other texts' processors."""
        self.among_others, self.live = True, Snapshot(self.processors)
        found = {id(part.thing): part.thing for part in self.live.holders() if part.thing is not self.processors}
        if not found.keys().isdisjoint(holders):
            self.refuse("shares what it remembers with another text's")
        holders |= found

    def reaches(self, place: int) -> bool:
        """Return whether `place` is reachable: no processor has raised before it."""
        return self.place is None or place - self.place < len(self.states)

    @contextmanager
    def at(self, place: int, everyone: bool) -> Iterator[None]:
        """Restore the state before `place` for the duration of the context. Places are entered in order from the first undecided one."""
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
        """Commit `count` more tokens. Raises a processor's exception if one of them is where it was raised.

        Raises: `ValueError` if a token follows one that a processor forbade, since the processor's state is then unknown.
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
        """Raise a `ValueError` that names the processors."""
        raise ValueError(f"logits_processor: {names(self.processors)} {what}: {way_out(self.processors)}")

    def settle(self) -> None:
        """Restore the state after the committed text, as `generate` leaves it."""
        if self.states:
            self._restore(self.states[0][0])

    def _restore(self, state: Snapshot) -> None:
        if self.live is not state:
            state.restore()
            self.live = state


class SharedState:
    """Snapshots of processors shared by several texts, whose state may change only in their first call, about all texts."""

    def __init__(self, processors: Sequence[LogitsProcessor], seeded: bool, from_first_call: bool):
        """`from_first_call`: the texts start together, so the first call is the one that `generate` makes."""
        self.processors, self.seeded, self.from_first_call = list(processors), seeded, from_first_call
        self.begin: int | None = None
        self.decided = False  # whether a token has been committed
        self.before: list[Snapshot] = []  # of each processor, before its first call
        self.now: list[Snapshot] = []  # of each processor, the permitted state

    @contextmanager
    def at(self, place: int, everyone: bool) -> Iterator[None]:
        """Run the processors at `place`; `everyone`: for all texts. Raises: `ValueError` if their state changes after the first call."""
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
            # A grammar processor fed with tokens of several texts, or a genuine error.
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
        """Return True: any position is reachable."""
        return True

    def commit(self, count: int) -> None:
        """Record that a token is committed: the state before the first call is no longer an option."""
        self.decided = True

    def settle(self) -> None:
        """Do nothing: later calls do not change the state."""

    def refuse(
        self, what: str, processors: Sequence[LogitsProcessor] = (), kind: type[ValueError] = ValueError
    ) -> NoReturn:
        """Raise an error of class `kind` that names the processors."""
        blamed = processors or self.processors
        other = "make one for each row, as generate_many does with logits_processor=a function of a prompt's token ids, or pass prompts one by one"
        raise kind(
            f"logits_processor: {names(blamed)} {what}, and one object serves several texts: {way_out(blamed, other)}"
        )


def random_numbers(read: bool) -> bytes:
    """Return the state of torch's global random numbers as bytes, which compare fast; empty unless `read`."""
    return torch.get_rng_state().numpy().tobytes() if read else b""
