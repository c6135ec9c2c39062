"""The files of a long run, a batch of prompts each: what is missing is made, with a bar, and sealed."""

from collections.abc import Callable
from pathlib import Path

import torch

from ..terminal import Bar
from .jobs import key_of, read_part, write_part
from .processes import Processes


Tell = Callable[[float], None]  # what share of a batch is done


def shard_name(number: int, ending: str) -> str:
    """The file of a batch of prompts."""
    return f"{number:05d}.{ending}"


def write_shards(
    record: Path, count: int, ending: str, make: Callable[[int, Tell], bytes], processes: Processes, seed: int, device: torch.device
) -> None:  # fmt: skip
    """Have `make(number, tell)` give what is in each of `count` files beside `record` that this process shall write and nobody has written.

    Each has random numbers that depend on `seed` and its number alone, so a run that was killed and gone on with gives the same files. `tell`
    moves the bar by the share of a file that is done.
    """
    key, part, numbers = key_of(record), record.parent, processes.share(range(count))
    with Bar(len(numbers), "collecting", "batches", quiet=not processes.first) as bar:
        for done, number in enumerate(numbers):
            shard = part / shard_name(number, ending)
            if read_part(shard, key) is not None:
                bar.skip(1)
                continue

            def tell(share: float, done: int = done) -> None:
                bar.to(done + share)

            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed * 1_000_003 + number)
                data = make(number, tell)
            write_part(shard, data, key)
            bar.to(done + 1)
    processes.wait()
