"""The server as an application of Ray Serve: a front, and replicas that write."""

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path

from prometheus_client import Metric
from pydantic import BaseModel, Field, ValidationError
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.types import Message, Scope

from ..policy.parse import split_policies
from ..server.assembly import KEY, ServerSettings, answer_request, check_key, read_policies
from ..server.http import CLOSING_SECONDS
from ..server.named_drafters import check_served, load_served
from ..validation import MOST, MOST_NEW_TOKENS, MOST_ROWS, nearest, one_line, shown
from .front import REPLICA, make_front


# Full replicas pass requests to the next ones, so that a beginning that all share does not wait for one replica.
ROUTER = RequestRouterConfig(
    request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    request_router_kwargs={"num_fallback_replicas": 1000},
)
REPLICAS = "expected a number from 1, or [least, most]"


class ReplicaSettings(BaseModel, extra="forbid"):
    """Arguments of `app`."""

    model: str | None = None
    assistant: str | None = None
    drafter: str | None = None
    policies: str = Field("svip", description="expected policies with commas between them, such as 'svip,strict'")
    name: str | None = None
    api_key: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    batch_size: int = Field(16, ge=1, le=MOST_ROWS)
    max_waiting: int = Field(256, ge=1, le=1_000_000)
    max_new_tokens: int = Field(512, ge=1, le=MOST_NEW_TOKENS)
    max_length: int | None = Field(None, ge=2, le=MOST)
    grace: float = Field(300, ge=0, le=86_400)
    replicas: int | tuple[int, int] = Field(1, description=REPLICAS)
    num_cpus: float = Field(1, ge=0, le=1e6)
    num_gpus: float = Field(0, ge=0, le=1e6)


def app(args: Mapping[str, object] | None = None, /, **settings: object) -> serve.Application:
    """Return `hf-lossy serve` as an application of Ray Serve: `serve.run(app(…))`, or `import_path: hf_lossy_assist.ray:app` in a config.

    Args:
        model, assistant, drafter, policies, name, api_key, batch_size, max_waiting, max_new_tokens, max_length: as the options of `hf-lossy serve`.
        dtype, device: as for `hla.load`; device "auto": the GPU that Ray assigned to a replica, if any.
        replicas: a number, or the least and the most for autoscaling. num_cpus, num_gpus: of each replica.
        grace: seconds for the texts of a replica that is to end; longer texts end with an error.
        args: all these, as a config has them.

    Raises: `ValueError` or `OSError`, one line, for an argument that is unknown or cannot be used.
    """
    read = _read(args, settings)
    least, most = (read.replicas, read.replicas) if isinstance(read.replicas, int) else read.replicas
    if not 1 <= least <= most:
        raise ValueError(f"replicas: {REPLICAS}, got {shown(read.replicas)}")
    scaled: dict[str, object] = {"num_replicas": least}
    if least < most:
        busy = max(1, read.batch_size * 3 // 4)
        scaled = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least, max_replicas=most, target_ongoing_requests=busy
            )
        }
    ongoing = read.batch_size * 5 // 4 + 1  # so that a place that becomes free does not wait for the front
    ending = {"graceful_shutdown_timeout_s": read.grace + CLOSING_SECONDS, "graceful_shutdown_wait_loop_s": 1.0}
    replica = serve.deployment(Replica).options(
        name=REPLICA,
        max_ongoing_requests=ongoing,
        max_queued_requests=read.max_waiting,
        max_constructor_retry_count=3,
        ray_actor_options={"num_cpus": read.num_cpus, "num_gpus": read.num_gpus},
        request_router_config=ROUTER,
        **scaled,
        **ending,
    )
    front = serve.deployment(serve.ingress(make_front)()).options(
        name="front", max_ongoing_requests=MOST, ray_actor_options={"num_cpus": 0}, **ending
    )
    return front.bind(replica.bind(read.model_dump()))


# Ray takes builders of one parameter.
app.__signature__ = inspect.Signature([inspect.Parameter("args", inspect.Parameter.POSITIONAL_ONLY)])  # type: ignore[attr-defined]


def _read(args: Mapping[str, object] | None, settings: Mapping[str, object]) -> ReplicaSettings:
    known = ReplicaSettings.model_fields
    if not isinstance(args, Mapping | None):
        raise TypeError(f"app: expected settings by name, such as app(model=…, assistant=…), got {shown(args)}")
    given = {**(args or {}), **settings}
    for name in given.keys() - known.keys():
        raise ValueError(f"app: {nearest('setting', str(name), known)}")
    try:
        read = ReplicaSettings.model_validate(given)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0])
        raise ValueError(f"{name}: {known[name].description or wrong['msg']}, got {shown(given[name])}") from None
    read.api_key = os.environ.get(KEY) if read.api_key is None else read.api_key
    check_key(read.api_key)
    read_policies(split_policies(read.policies))
    # Ray tells a replica's error in a page.
    check_served(read.model, read.assistant, read.drafter, read.dtype, read.device)
    return read


class Replica:
    """A server without a port."""

    def __init__(self, given: Mapping[str, object]):
        settings = ReplicaSettings.model_validate(given)
        models, drafter = load_served(
            settings.model, settings.assistant, settings.drafter, settings.dtype, settings.device
        )
        shared = {name: getattr(settings, name) for name in ServerSettings.__dataclass_fields__}
        shared["name"] = settings.name or ("demo" if settings.model is None else Path(settings.model).name)
        policies = read_policies(split_policies(settings.policies))
        self.server = ServerSettings(**shared).make_server(models, drafter, policies)
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
