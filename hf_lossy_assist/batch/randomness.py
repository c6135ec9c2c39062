"""Random numbers of a call: from the global generator, one of the caller's, or one for each row."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ..round import BONUS_PLACE, Verified
from ..rules.base import race
from ..validation import shown


COINS = BONUS_PLACE - 1  # the place of a round's coins
SEED = BONUS_PLACE - 2  # and of a seed for code that takes none of these


class Randomness:
    """Coins and drawn tokens of one call. Nothing else in a call is random."""

    def __init__(self, generator: torch.Generator | Sequence[torch.Generator] | None = None, rows: int = 1):
        """`rows`: of the call. `generator`: one for all rows; one for each row of the call; None: torch's global one, which `torch.manual_seed` seeds.

        With one for each row, what a row draws does not depend on the rows beside it. Each gives one number, when the call begins.

        Raises: `ValueError` where there are not as many generators as rows.
        """
        if isinstance(generator, Sequence) and len(generator) != rows:
            raise ValueError(
                f"generator: {len(generator)} generators were given, and this call has {rows} rows: one each"
            )
        self.generator: torch.Generator | None = None if isinstance(generator, Sequence) else generator
        self.rows: list[RowRandomness] | None = None
        self._round: list[int] | None = None  # the rows of the round under way, which the device need not be asked for
        if isinstance(generator, Sequence):
            self.rows = [RowRandomness(g) for g in generator]

    def insert(self, row: int, generator: torch.Generator) -> None:
        """Let row `row` of the call draw what a call of one row would draw with this generator."""
        assert self.rows is not None, "each row has numbers of its own"
        self.rows[row] = RowRandomness(generator)

    def for_filters(self) -> "Randomness":
        """Return numbers of the same source that nothing else in the round uses."""
        if self.rows is None:
            return self
        out = Randomness()
        out.rows, out._round = [row.for_filters() for row in self.rows], self._round
        return out

    def begin_round(self, row_ids: Sequence[int]) -> None:
        """Begin a round about these rows of the call."""
        if self.rows is not None:
            self._round = list(row_ids)
            for row in row_ids:
                self.rows[row].begin_round()

    def coins(self, verified: Verified) -> torch.Tensor:
        """Draw what acceptance probabilities are compared with, (B, γ) float32 in [0, 1)."""
        return self.uniforms(verified.row_ids, verified.draft.gamma, verified.tokens.device)

    def uniforms(self, row_ids: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
        """Draw the round's coins for `count` places, (B, count) float32 in [0, 1)."""
        if self.rows is None:
            return torch.rand(len(row_ids), count, device=device, generator=self.generator, dtype=torch.float32)
        return torch.stack([self.rows[row].coins(count) for row in self._round or row_ids.tolist()]).to(device)

    @contextmanager
    def everywhere(self, call_row: int, device: torch.device) -> Iterator[None]:
        """Make torch's global numbers those of this call's row `call_row`: for code that takes no generator."""
        if self.generator is None and self.rows is None:
            yield
            return
        if self.rows is None:
            assert self.generator is not None, "one of both is there"
            seed = _draw_seed(self.generator)
        else:
            seed = self.rows[call_row].seed_for_others()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    def draw(self, probs: torch.Tensor, row_ids: torch.Tensor, place: int) -> torch.Tensor:
        """Draw one token from each distribution (B, V), not necessarily normalised → (B,) int64.

        `row_ids` (B,): each row's number in the call. `place`: which of the round's tokens it is, the drafted ones
        from 0; two draws of one place are not independent where each row has a generator of its own.
        """
        return race(probs, self.exponentials(row_ids, place, probs.shape[-1], probs.device))

    def exponentials(self, row_ids: torch.Tensor, place: int, size: int, device: torch.device) -> torch.Tensor:
        """Draw what `draw` divides probabilities by, (B, size) float32; arguments as there."""
        if self.rows is None:
            return exponentials(len(row_ids), size, device, self.generator)
        drawn = [self.rows[row].exponentials(place, size) for row in self._round or row_ids.tolist()]
        return torch.stack(drawn).to(device)


def exponentials(batch: int, size: int, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """Draw as `exponential_`, (batch, size) float32: the same numbers of the generator and the same results."""
    if device.type != "cpu":
        numbers = torch.empty(batch, size, device=device, dtype=torch.float32)
        return numbers.exponential_(generator=generator)
    # On the CPU `exponential_` takes a logarithm at a time, and more than twice as long.
    numbers = torch.rand(batch, size, device=device, generator=generator, dtype=torch.float64)
    return numbers.neg_().log1p_().neg_().to(torch.float32)


class RowRandomness:
    """One row's random numbers. Each draw has a stream of its own, which the round and the place in it decide.

    A row that waits for others draws tokens that it does not need; so they cannot move its later ones. Philox is a random function of a
    256-bit counter (Salmon et al., SC 2011): torch's own generator for the CPU keeps 32 bits of a seed, and streams would come back.
    """

    def __init__(self, generator: torch.Generator):
        self.seed, self.round, self.user = _draw_seed(generator), 0, 0

    def for_filters(self) -> "RowRandomness":
        """Return the same row and round, with places of its own."""
        out = copy.copy(self)
        out.user = 1
        return out

    def begin_round(self) -> None:
        self.round += 1

    def coins(self, count: int) -> torch.Tensor:
        """Draw (count,) float32 in [0, 1); the first ones are the same whatever `count` is."""
        return torch.from_numpy(self._at(COINS).random(count, dtype=np.float32))

    def seed_for_others(self) -> int:
        """Draw a seed for the round's drafts of code that takes no generator."""
        return int(self._at(SEED).integers(1 << 62))

    def exponentials(self, place: int, size: int) -> torch.Tensor:
        """Draw (size,) float32, exponentially distributed."""
        # In float64 first: NumPy's float32 ones are 0 once in 8 million, which would win every race.
        numbers = torch.from_numpy(self._at(place).standard_exponential(size)).to(torch.float32)
        return numbers.clamp(min=torch.finfo(torch.float32).tiny)

    def _at(self, place: int) -> np.random.Generator:
        # The lowest of the four 64-bit words counts the numbers of the stream.
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, place, self.round, self.user]))


def _draw_seed(generator: torch.Generator) -> int:
    return int(torch.randint(1 << 62, (1,), generator=generator, device=generator.device))


def check_generator(generator: object) -> torch.Generator | list[torch.Generator] | None:
    """Refuse what is neither a generator nor several."""
    if generator is None or isinstance(generator, torch.Generator):
        return generator
    if isinstance(generator, Sequence) and generator and all(isinstance(g, torch.Generator) for g in generator):
        return list(generator)
    raise TypeError(
        f"generator: expected a torch.Generator, or a list with one for each row of the batch, got {shown(generator)}"
    )
