"""Random numbers of a call, from torch's global generator, a given one, or one for each row."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ..round import BONUS_PLACE, Verified
from ..rules.base import race
from ..tensors import fork_random
from ..validation import shown


COINS = BONUS_PLACE - 1  # position of a round's coins
SEED = BONUS_PLACE - 2  # position of a seed for code that takes no generator


class TextGenerators:
    """The generators of random numbers of `generate_many`, one for each text."""

    def __init__(self, seed: int | None):
        """`seed`: of all texts; None: drawn from torch's global generator for the first text that draws numbers."""
        self.seed = seed

    def make(self, index: int, seed: int | None, draws: bool) -> torch.Generator:
        """Return the generator of text `index`, or of a text with its `seed`.
        `draws`: it is read, unlike in greedy decoding."""
        if self.seed is None and seed is None and draws:
            self.seed = int(torch.randint(1 << 62, ()))
        # NumPy treats (s,) and (s, 0) as the same source: without the key, a text's seed s would repeat the numbers of
        # text 0 under seed s.
        source, key = ([self.seed or 0, index], ()) if seed is None else ([seed], (0,))
        state = int(np.random.SeedSequence(source, spawn_key=key).generate_state(1, np.uint64)[0])
        return torch.Generator().manual_seed(state >> 1)


class Randomness:
    """The coins and sampled tokens of a call, its only random numbers."""

    def __init__(self, generator: torch.Generator | Sequence[torch.Generator] | None = None, rows: int = 1):
        """`rows`: the call's rows. `generator`: one for all rows; a list with one for each row; None: torch's global
        one (`torch.manual_seed`).

        With one for each row, a row's draws do not depend on the other rows. Each generator yields one number, when the
        call begins.

        Raises: `ValueError` if the numbers of generators and rows differ.
        """
        if isinstance(generator, Sequence) and len(generator) != rows:
            raise ValueError(
                f"generator: {len(generator)} generators were given, and this call has {rows} rows: one each"
            )
        self.generator: torch.Generator | None = None if isinstance(generator, Sequence) else generator
        self.rows: list[RowRandomness] | None = None
        self._round: list[int] | None = None  # row ids of the current round on the host
        if isinstance(generator, Sequence):
            self.rows = [RowRandomness(g) for g in generator]

    def insert(self, row: int, generator: torch.Generator) -> None:
        """Let row `row` draw what a call with one row would draw from `generator`."""
        assert self.rows is not None, "each row has numbers of its own"
        self.rows[row] = RowRandomness(generator)

    def for_filters(self) -> "Randomness":
        """Return independent random numbers from the same source for filters."""
        if self.rows is None:
            return self
        out = Randomness()
        out.rows, out._round = [row.for_filters() for row in self.rows], self._round
        return out

    def begin_round(self, row_ids: Sequence[int]) -> None:
        """Begin a round with these rows of the call."""
        if self.rows is not None:
            self._round = list(row_ids)
            for row in row_ids:
                self.rows[row].begin_round()

    def coins(self, verified: Verified) -> torch.Tensor:
        """Draw the numbers that acceptance probabilities are compared with, (B, γ) float32 in [0, 1)."""
        return self.uniforms(verified.row_ids, verified.draft.gamma, verified.tokens.device)

    def uniforms(self, row_ids: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
        """Draw the round's coins for `count` positions, (B, count) float32 in [0, 1)."""
        if self.rows is None:
            return torch.rand(len(row_ids), count, device=device, generator=self.generator, dtype=torch.float32)
        return torch.stack([self.rows[row].coins(count) for row in self._round or row_ids.tolist()]).to(device)

    @contextmanager
    def everywhere(self, call_row: int, device: torch.device) -> Iterator[None]:
        """Seed torch's global generator for row `call_row` within the context, for code that takes no generator."""
        if self.generator is None and self.rows is None:
            yield
            return
        if self.rows is None:
            assert self.generator is not None, "one of both is there"
            seed = _draw_seed(self.generator)
        else:
            seed = self.rows[call_row].seed_for_others()
        with fork_random(device):
            torch.manual_seed(seed)
            yield

    def draw(self, probs: torch.Tensor, row_ids: torch.Tensor, slot: int) -> torch.Tensor:
        """Draw one token from each distribution (B, V), not necessarily normalised; return (B,) int64.

        `row_ids` (B,): index of each row in the call. `slot`: position of the token in the round, drafted tokens from
        0; with one generator per row, two draws at one position are not independent.
        """
        return race(probs, self.exponentials(row_ids, slot, probs.shape[-1], probs.device))

    def exponentials(self, row_ids: torch.Tensor, slot: int, size: int, device: torch.device) -> torch.Tensor:
        """Draw the exponential numbers for `draw`, (B, size) float32. Arguments as in `draw`."""
        if self.rows is None:
            return exponentials(len(row_ids), size, device, self.generator)
        drawn = [self.rows[row].exponentials(slot, size) for row in self._round or row_ids.tolist()]
        return torch.stack(drawn).to(device)


def exponentials(batch: int, size: int, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """Draw (batch, size) float32: the same numbers and results as `exponential_`."""
    if device.type != "cpu":
        numbers = torch.empty(batch, size, device=device, dtype=torch.float32)
        return numbers.exponential_(generator=generator)
    # On the CPU `exponential_` takes one logarithm at a time and more than twice as long.
    numbers = torch.rand(batch, size, device=device, generator=generator, dtype=torch.float64)
    return numbers.neg_().log1p_().neg_().to(torch.float32)


class RowRandomness:
    """The random numbers of one row: a separate stream for each round and position.

    A row that waits for others draws tokens that it does not need; separate streams keep these from shifting its later
    draws. Philox is a random function of a 256-bit counter (Salmon et al., SC 2011); torch's CPU generator keeps 32
    bits of a seed, so streams would repeat.
    """

    def __init__(self, generator: torch.Generator):
        self.seed, self.round, self.user = _draw_seed(generator), 0, 0

    def for_filters(self) -> "RowRandomness":
        """Return the same row and round with separate streams."""
        out = copy.copy(self)
        out.user = 1
        return out

    def begin_round(self) -> None:
        self.round += 1

    def coins(self, count: int) -> torch.Tensor:
        """Draw (count,) float32 in [0, 1); a smaller `count` gives a prefix."""
        return torch.from_numpy(self._at(COINS).random(count, dtype=np.float32))

    def seed_for_others(self) -> int:
        """Draw a seed for the round's drafts by code that takes no generator."""
        return int(self._at(SEED).integers(1 << 62))

    def exponentials(self, slot: int, size: int) -> torch.Tensor:
        """Draw (size,) float32 from the exponential distribution."""
        # float64 first: NumPy's float32 draws are 0 once in 8 million, and a 0 would win every race.
        numbers = torch.from_numpy(self._at(slot).standard_exponential(size)).to(torch.float32)
        return numbers.clamp(min=torch.finfo(torch.float32).tiny)

    def _at(self, slot: int) -> np.random.Generator:
        # The lowest 64-bit word of the counter numbers the draws of the stream.
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, slot, self.round, self.user]))


def _draw_seed(generator: torch.Generator) -> int:
    return int(torch.randint(1 << 62, (1,), generator=generator, device=generator.device))


def check_generator(generator: object) -> torch.Generator | list[torch.Generator] | None:
    """Return a generator, a list of them or None. Raises: `TypeError` for anything else."""
    if generator is None or isinstance(generator, torch.Generator):
        return generator
    if isinstance(generator, Sequence) and generator and all(isinstance(g, torch.Generator) for g in generator):
        return list(generator)
    raise TypeError(
        f"generator: expected a torch.Generator, or a list with one for each row of the batch, got {shown(generator)}"
    )
