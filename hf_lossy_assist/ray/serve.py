"""The server as an application of Ray Serve: a front, and replicas that write."""

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from typing import Annotated

from prometheus_client import Metric
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.types import Message, Scope

from ..server.http import CLOSING_SECONDS
from ..server.named_drafters import check_served, load_served
from ..server.routes import make_server, read_policies
from ..server.settings import KEY, ServerSettings
from ..validation import MOST, nearest, one_line, shown
from .front import REPLICA, answer_request, make_front


# Full replicas pass requests to the next ones, so that a beginning that all share does not wait for one replica.
ROUTER = RequestRouterConfig(
    request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    request_router_kwargs={"num_fallback_replicas": 1000},
)


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings(ServerSettings):
    """Arguments of `app`."""

    model: str | None = None
    assistant: str | None = None
    drafter: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    grace: Annotated[float, (0, 86_400), "seconds for the texts of a replica that is to end"] = 300
    replicas: int | tuple[int, int] = 1
    num_cpus: Annotated[float, (0, 1e6), "of each replica"] = 1
    num_gpus: Annotated[float, (0, 1e6), "of each replica"] = 0


def app(args: Mapping[str, object] | None = None, /, **settings: object) -> serve.Application:
    """Return `hf-lossy serve` as an application of Ray Serve: `serve.run(app(…))`, or `import_path: hf_lossy_assist.ray:app` in a config.

    Args:
        settings: as the options of `hf-lossy serve`, such as model, assistant, policies, batch_size; and those below.
        dtype, device: as for `hla.load`; device "auto": the GPU that Ray assigned to a replica, if any.
        replicas: a number, or the least and the most for autoscaling. num_cpus, num_gpus: of each replica.
        grace: seconds for the texts of a replica that is to end; longer texts end with an error.
        args: all these, as a config has them.
    """
    read = _read(args, settings)
    least, most = (read.replicas, read.replicas) if isinstance(read.replicas, int) else read.replicas
    if not 1 <= least <= most:
        raise ValueError(f"replicas: expected a number from 1, or [least, most], got {shown(read.replicas)}")
    busy = max(1, read.batch_size * 3 // 4)
    scaled = AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=busy)
    ending = {"graceful_shutdown_timeout_s": read.grace + CLOSING_SECONDS, "graceful_shutdown_wait_loop_s": 1.0}
    replica = serve.deployment(Replica).options(
        name=REPLICA,
        # More than a batch, so that a slot that becomes free does not wait for the front.
        max_ongoing_requests=read.batch_size * 5 // 4 + 1,
        max_queued_requests=read.max_waiting,
        max_constructor_retry_count=3,
        ray_actor_options={"num_cpus": read.num_cpus, "num_gpus": read.num_gpus},
        request_router_config=ROUTER,
        autoscaling_config=scaled,
        **ending,
    )
    front = serve.deployment(serve.ingress(make_front)()).options(
        name="front", max_ongoing_requests=MOST, ray_actor_options={"num_cpus": 0}, **ending
    )
    return front.bind(replica.bind(read))


# Ray takes builders of one parameter.
app.__signature__ = inspect.Signature([inspect.Parameter("args", inspect.Parameter.POSITIONAL_ONLY)])  # type: ignore[attr-defined]


def _read(args: Mapping[str, object] | None, settings: Mapping[str, object]) -> ReplicaSettings:
    merged, names = {**(args or {}), **settings}, [field.name for field in fields(ReplicaSettings)]
    for name in merged.keys() - set(names):
        raise ValueError(f"app: {nearest('setting', str(name), names)}")
    try:
        read = TypeAdapter(ReplicaSettings).validate_python(merged)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ValueError(
            ": ".join([*map(str, wrong["loc"][:1]), wrong["msg"].removeprefix("Value error, ")])
        ) from None
    read = replace(read, api_key=os.environ.get(KEY) if read.api_key is None else read.api_key)
    read_policies(read.policies)
    # Ray tells a replica's error in a page.
    check_served(read.model, read.assistant, read.drafter, read.dtype, read.device)
    return read


class Replica:
    """A server without a port."""

    def __init__(self, settings: ReplicaSettings):
        models, drafter = load_served(
            settings.model, settings.assistant, settings.drafter, settings.dtype, settings.device
        )
        name = settings.name_model(settings.model)
        self.server = make_server(settings, name, models, drafter, read_policies(settings.policies))
        self.app = self.server.app()
        self.server.worker.start()

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Yield the messages of ASGI that answer a request."""
        async with aclosing(answer_request(self.app, scope, body)) as messages:
            async for message in messages:
                yield message

    async def collect_metrics(self) -> list[Metric]:
        """Return the server's metrics, labelled with the name of this replica."""
        return self.server.metrics.collect_labelled({"replica": serve.get_replica_context().replica_id.unique_id})

    def check_health(self) -> None:
        """Raise `RuntimeError` once no text can be written any more: Ray then replaces this replica."""
        if not self.server.worker.is_alive():
            raise RuntimeError(f"the engine has ended: {one_line(repr(self.server.worker.error))}")

    async def __del__(self) -> None:
        if hasattr(self, "server"):
            self.server.grammars.close()
            await asyncio.to_thread(self.server.worker.stop, CLOSING_SECONDS)
