"""The front of the server's replicas on Ray Serve: each request goes to the replica that holds the beginning of its prompt."""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from ..server.bodies import RequestError, format_event, make_error
from ..server.http import BodyReader, Bounds, refuse
from ..validation import one_line


REPLICA = "replica"  # name of the deployment
BEGINNING = 256  # characters, or 64 token ids: of a shorter prompt there is little to reuse
PASSED = "type method path root_path raw_path query_string headers http_version scheme".split()  # of ASGI's scope
TRIES = 2  # a request that ends replicas must not end all
LOST = "the replica that wrote this text ended before the text did: ask again"


class Front:
    """An ASGI application. A request is sent to another replica if its replica ends before the first part of the answer."""

    def __init__(self, replicas: DeploymentHandle):
        self.replicas, self.bodies = replicas.options(stream=True), BodyReader(Bounds())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await self.bodies.read(request) if request.method == "POST" else None
        except RequestError as error:
            return await refuse(str(error), error.status)(scope, receive, send)
        except ClientDisconnect:
            return
        replicas = self.replicas.options(session_id=find_session(body)) if body is not None else self.replicas
        request_scope = {name: scope[name] for name in PASSED if name in scope}, json.dumps(body).encode()
        message = LOST
        for _ in range(TRIES):
            try:
                if await pass_on(replicas.answer.remote(*request_scope), send):
                    return
            except (BackPressureError, DeploymentUnavailableError) as error:
                message = one_line(error)
                break
        await refuse(message, 503)(scope, receive, send)

    async def show_metrics(self, request: Request) -> Response:
        """Return the metrics of all replicas as one page for Prometheus."""
        merged = dict[str, Metric]()
        replies = self.replicas.broadcast("collect_metrics")
        for families in await replies.results_async(timeout_s=10, return_exceptions=True):
            for metrics in families if isinstance(families, list) else ():
                family = merged.setdefault(metrics.name, Metric(metrics.name, metrics.documentation, metrics.type))
                family.samples += metrics.samples
        page: Any = SimpleNamespace(collect=merged.values)
        return Response(generate_latest(page), media_type=CONTENT_TYPE_LATEST)


async def pass_on(replies: DeploymentResponseGenerator, send: Send) -> bool:
    """Send an answer, its head together with its first part; return False if its replica ended before.

    If the replica ends later, the answer ends with an error: no other replica may continue it.
    """
    head, begun = dict[str, object](), False
    try:
        async for message in replies:
            if message["type"] == "http.response.start":
                head = message
                continue
            if not begun:
                begun = True
                await send(head)
            await send(message)
    except (
        RayActorError,
        ObjectLostError,
        WorkerCrashedError,
    ):  # parts that were not fetched are lost with the replica
        if begun:
            event = format_event(make_error(LOST, 503)).encode()
            await send({"type": "http.response.body", "body": event, "more_body": False})
        return begun
    finally:
        replies.cancel()  # frees the rows of a client that is gone
    return begun


async def answer_request(app: Starlette, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
    """Yield the messages of ASGI with which an application answers a request whose body is known. Closing the iterator ends the request."""
    messages, bodies = asyncio.Queue[Message | None](), [body]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    call = asyncio.ensure_future(app(scope, receive, messages.put))
    call.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            yield message
    finally:
        call.cancel()


def make_front() -> Starlette:
    """Return the application, in a replica of the front."""
    front = Front(serve.get_deployment_handle(REPLICA, serve.get_replica_context().app_name))
    return Starlette(routes=[Route("/metrics", front.show_metrics), Mount("/", front)])


def find_session(body: object) -> str:
    """Return what requests of a conversation share: `prompt_cache_key`, or a prompt's beginning, or a chat up to its first user's turn."""
    fields = body if isinstance(body, dict) else {}
    prompt, turns, key = fields.get("prompt"), fields.get("messages"), fields.get("prompt_cache_key")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if key is None and isinstance(turns, list):
        roles = [turn.get("role") if isinstance(turn, dict) else None for turn in turns]
        key = turns[: roles.index("user") + 1 if "user" in roles else 1]
    elif key is None and isinstance(prompt, str | list):
        key = prompt[: BEGINNING if isinstance(prompt, str) else BEGINNING // 4]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()
