"""Ray as a backend for units of work: Ray Data's pool of actors runs them, restarts what a lost machine had, and grows with the cluster."""

import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import ray.data

from ..models.identity import check_same, versions, weights_hash
from ..terminal import Bar
from ..training.processes import Models, Processes, T, Work
from ..validation import one_line


LOCAL = "local"  # the address for a cluster of this machine's cores, which ends with the job


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a Ray cluster within the context, or use the connection that exists. Raises: `ValueError`, one line."""
    if ray.is_initialized():
        yield
        return
    # Otherwise Ray warns of a default of its next release, and of the actors of Ray Data.
    os.environ.update({"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"} | os.environ)
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal() and "/" not in host:  # Ray itself waits for a minute
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # other versions, no answer, no address: Ray raises them as plain exceptions, too
        raise ValueError(
            f"--ray {address}: no cluster to work on ({one_line(error)}): start one with `ray start --head`, or pass --ray {LOCAL}"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


class UnitWorker:
    """A callable for `map_batches`: blocks of unit numbers in, each unit's pickled result or error out. Loads the models once."""

    def __init__(self, work: Work, load: Callable[[], Models], expected: Mapping[str, str]):
        self.work, self.load, self.expected = work, load, expected
        self.models: Models | None = None  # loaded by the first block: Ray repeats a constructor that fails

    def __call__(self, block: Mapping[str, Sequence[int]]) -> dict[str, object]:
        try:
            if self.models is None:
                check_same(self.expected, versions())
                self.models = self.load()
                check_same(self.expected, hash_weights(self.models))
            found = dict(self.work(self.models, list(map(int, block["unit"])), lambda number, part: None))
        except Exception as error:  # models and tasks raise errors of any type
            line = f"worker {os.getpid()} on {ray.util.get_node_ip_address()}: {one_line(error, 400)}"
            return {"unit": [-1], "result": [pickle.dumps(line)]}
        return {"unit": sorted(found), "result": [pickle.dumps(found[number]) for number in sorted(found)]}


def hash_weights(models: Models) -> dict[str, str]:
    """Return the hash of the target's and the draft's weights, by name."""
    return {
        f"weights of the {role}": weights_hash(model)
        for role, model in zip(("target", "draft"), models, strict=False)
        if model is not None
    }


@dataclass(frozen=True, kw_only=True)
class Workers(Processes):
    """Actors of a Ray cluster, which run units of work; the process that starts the job stores the results.

    Args:
        address: of the cluster, "auto" for the one that this machine belongs to, or "local".
        load: loads the models in each actor; None: the job's are sent to the actors.
        num_cpus, num_gpus: of an actor; None: one GPU if the cluster has any.
    """

    address: str = "auto"
    load: Callable[[], Models] | None = None
    num_cpus: float = 1
    num_gpus: float | None = None

    def run(
        self,
        work: Work[T],
        models: Models,
        units: Sequence[int],
        write: Callable[[int, T], object],
        named: tuple[str, str],
        at_once: int = 1,
    ) -> None:
        """As `Processes.run`. Raises: `ValueError`, one line with the worker's name, for errors of a unit."""
        if not units:
            return
        with connected(self.address), Bar(len(units), *named) as bar:
            sent = None if self.load is not None else ray.put(models)
            load = self.load if self.load is not None else lambda: ray.get(sent)
            blocks, gpus = -(-len(units) // at_once), self.num_gpus
            gpus = min(ray.cluster_resources().get("GPU", 0), 1) if gpus is None else gpus
            numbers = ray.data.from_items([{"unit": number} for number in units], override_num_blocks=blocks)
            found = numbers.map_batches(
                UnitWorker,
                fn_constructor_args=(work, load, versions() | hash_weights(models)),
                compute=ray.data.ActorPoolStrategy(),
                batch_size=at_once,
                num_cpus=self.num_cpus,
                num_gpus=gpus,
            )
            for row in rows_of(found):
                if row["unit"] < 0:
                    raise ValueError(pickle.loads(row["result"]))
                write(row["unit"], pickle.loads(row["result"]))
                bar.to(bar.done + 1)


def rows_of(dataset: "ray.data.Dataset") -> Iterator[dict[str, Any]]:
    """Yield the rows as they are finished. Raises: `ValueError`, one line, for Ray's errors."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield from dataset.iter_rows()
    except ray.exceptions.RayError as error:
        raise ValueError(f"Ray ended the job: {one_line(error, 400)}") from None
