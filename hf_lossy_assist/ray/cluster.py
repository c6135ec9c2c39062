"""Ray as a backend for units of work: Ray Data's pool of actors runs them, restarts what a lost machine had, and grows with the cluster."""

import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import ray.data
import torch

from ..artifacts.conditions import describe_machine
from ..artifacts.identity import check_same, hash_weights, versions
from ..models.introspection import device_of
from ..terminal import Bar
from ..training.processes import M, Processes, T, Work
from ..validation import one_line


RETRIES = 5  # of a unit whose worker dies: some units may end whatever worker has them


class UnitWorker:
    """A callable for `map_batches`. It loads the models with the first block: Ray repeats a constructor that fails."""

    def __init__(self, work: Work, load: Any, expected: dict[str, str], machine: str | None = None):
        self.work, self.load, self.expected, self.machine = work, load, expected, machine
        self.models: Any = None

    def __call__(self, block: Mapping[str, Sequence[int]]) -> dict[str, object]:
        try:
            if self.models is None:
                self.models = self._load_models()
            results = dict(self.work(self.models, list(map(int, block["unit"])), lambda *_: None))
        except Exception as error:  # models and tasks raise errors of any type
            line = f"worker {os.getpid()} on {ray.util.get_node_ip_address()}: {one_line(error, 300)}"
            return {"unit": [-1], "result": [pickle.dumps(line)]}
        return {"unit": sorted(results), "result": [pickle.dumps(results[unit]) for unit in sorted(results)]}

    def _load_models(self) -> Any:
        """Load the models; refuse others than the job's, and another kind of machine where seconds are measured."""
        check_same(self.expected, versions())
        models = self.load()
        check_same(self.expected, hash_weights(models))
        machine = describe_machine(device_of(models[0]))
        if self.machine not in (None, machine):
            raise ValueError(f"this is {machine}, others are {self.machine}: seconds compare on nodes of one kind")
        return models


@dataclass(frozen=True, kw_only=True)
class Workers(Processes):
    """Actors of a Ray cluster, which run units of work; the process that starts the job stores the results.

    Args:
        address: of the cluster, "auto" for the one that this machine belongs to, or "local" for this machine's cores.
        load: loads the models in each actor; None: the job's are sent to the actors.
        num_cpus, num_gpus: of an actor; None: one GPU if the cluster has any.
        timed: refuse actors on machines of several kinds.
    """

    address: str = "auto"
    load: Callable[[], tuple[object, ...]] | None = None
    num_cpus: float = 1
    num_gpus: float | None = None
    timed: bool = False

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to the cluster within the context, or use the connection that exists."""
        if ray.is_initialized():
            yield
            return
        # Otherwise Ray warns of a default of its next release, and of the actors of Ray Data.
        os.environ.update({"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"} | os.environ)
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        try:
            if host:  # Ray itself waits for half a minute or more
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # other versions, no answer, no address: Ray raises them as plain exceptions, too
            raise ValueError(
                f"--ray {self.address}: no cluster to work on ({one_line(error, 120)}): "
                "start one with `ray start --head`, or pass --ray local"
            ) from None
        try:
            yield
        finally:
            ray.shutdown()

    def find_machine(self, device: torch.device) -> str:
        """Return the name of the machine of a worker."""
        with self.connected():
            device = torch.device("cuda" if self._needs()["num_gpus"] else "cpu")
            return str(ray.get(ray.remote(describe_machine).options(**self._needs()).remote(device)))

    def _needs(self) -> dict[str, float]:
        """Return what an actor needs."""
        gpus = min(ray.cluster_resources().get("GPU", 0), 1) if self.num_gpus is None else self.num_gpus
        return {"num_cpus": self.num_cpus, "num_gpus": gpus}

    def run(
        self,
        work: Work[M, T],
        models: M,
        units: Sequence[int],
        write: Callable[[int, T], object],
        named: tuple[str, str],
        at_once: int = 1,
    ) -> None:
        """As `Processes.run`; an error of a unit names its worker."""
        if not units:
            return
        with self.connected(), Bar(len(units), *named) as bar:
            load = self.load or partial(ray.get, ray.put(models))
            blocks = -(-len(units) // at_once)
            machine = self.find_machine(device_of(models[0])) if self.timed else None
            rows = ray.data.from_items([{"unit": unit} for unit in units], override_num_blocks=blocks)
            results = rows.map_batches(
                UnitWorker,
                fn_constructor_args=(work, load, versions() | hash_weights(models), machine),
                compute=ray.data.ActorPoolStrategy(),
                batch_size=at_once,
                max_restarts=-1,
                max_task_retries=RETRIES,
                **self._needs(),
            )
            ray.data.DataContext.get_current().enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # a failure ends in the line below
            try:
                for row in results.iter_rows():
                    if row["unit"] < 0:
                        raise ValueError(pickle.loads(row["result"]))
                    write(row["unit"], pickle.loads(row["result"]))
                    bar.to(bar.done + 1)
            except ray.exceptions.RayError as error:
                raise ValueError(f"Ray ended the job: {one_line(error, 300)}") from None
