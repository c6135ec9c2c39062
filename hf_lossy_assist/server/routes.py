"""The server of loaded models, and its routes: /v1/completions, /v1/chat/completions, /v1/models, /metrics and /health."""

import asyncio
import hashlib
import hmac
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..drafters.base import Drafter
from ..models.introspection import end_tokens
from ..policy.parse import as_policy, split_policies
from ..policy.policy import LossyPolicy
from ..validation import shown
from .answers import Metrics, Pending, TextFailed
from .bodies import RequestError, RequestLimits, find_longest
from .detokenize import TokenTexts
from .grammars import Grammars
from .http import CLOSING_SECONDS, FREE_BYTES, MOST_BYTES, BodyReader, Bounds, EventStream, count_connections, refuse
from .requests import read_request
from .settings import ServerSettings
from .worker import Worker


GONE = 499  # nginx's status for a client that disconnected; nobody receives it


class Server:
    """Answers requests with texts written by `worker`.

    Args:
        model: its name for clients. limits: on their requests. key: the API key they must present; None: none.
        bounds: limits on their use of resources.
    """

    def __init__(self, worker: Worker, model: str, limits: RequestLimits, key: str | None, bounds: Bounds):
        self.worker, self.model, self.key, self.bounds = worker, model, key, bounds
        self.limits = replace(limits, most_texts=min(limits.most_texts, worker.most))
        self.bodies, self.long_bodies = BodyReader(bounds), asyncio.Semaphore(1)
        self.metrics = Metrics(lambda: worker.load, model)
        self.grammars = Grammars(worker.tokenizer, end_tokens(worker.target.generation_config))
        self.token_texts = TokenTexts(worker.tokenizer)
        self.began = int(time.time())

    def app(self) -> Starlette:
        """Return the application. Its worker runs from startup to shutdown, at which the texts being written are completed."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            yield
            self.grammars.close()
            await asyncio.to_thread(self.worker.stop, CLOSING_SECONDS)

        routes = [
            Route("/v1/completions", partial(self.respond, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.respond, chat=True), methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/metrics", self.show_metrics),
            Route("/health", self.health),
        ]
        return Starlette(
            routes=routes,
            lifespan=lifespan,
            exception_handlers={kind: self._refuse for kind in (HTTPException, RequestError, Exception)},
        )

    async def models(self, request: Request) -> Response:
        """Return the one model, in a list or by name, with the policies that requests may name."""
        self._check_key(request)
        model = {"id": self.model, "object": "model", "created": self.began, "owned_by": "hf_lossy_assist"}
        model |= {"lossy_policies": list(self.limits.policies)}
        name = request.path_params.get("name")
        if name not in (None, self.model):
            raise RequestError(f"model: this server has {self.model!r}, got {shown(name)}", 404)
        return JSONResponse({"object": "list", "data": [model]} if name is None else model)

    async def show_metrics(self, request: Request) -> Response:
        """Return the page for Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def health(self, request: Request) -> Response:
        """Return 200 while texts can be written."""
        return Response(status_code=200 if self.worker.is_alive() else 503)

    def _check_key(self, request: Request) -> None:
        scheme, _, presented = request.headers.get("authorization", "").partition(" ")
        if self.key is not None:
            is_right = hmac.compare_digest(presented.strip().encode(), self.key.encode())
            if scheme.lower() != "bearer" or not is_right:
                raise RequestError("the API key is wrong, or missing", 401)

    async def respond(self, http: Request, chat: bool) -> Response:
        """Continue a prompt or a conversation."""
        pending: Pending | None = None
        try:
            pending = await self._submit(http, chat)
            if pending.request.texts[0].stream:
                return EventStream(pending.stream(*await pending.next()), lambda: pending.end("abort"))
            response = JSONResponse(await pending.whole())
            pending.end()
            return response
        except BaseException as error:
            if pending is not None:
                refused = isinstance(error, Exception) and not isinstance(error, ClientDisconnect)
                pending.end(None if refused else "abort")
            if isinstance(error, ClientDisconnect):
                return Response(status_code=GONE)
            raise  # to `_refuse`

    async def _submit(self, http: Request, chat: bool) -> Pending:
        self._check_key(http)
        body = await self.bodies.read(http)
        self.worker.check_room(1)
        # Long bodies are read one after the other, so that short ones find a thread.
        is_long = int(http.headers.get("content-length", MOST_BYTES)) > FREE_BYTES
        async with self.long_bodies if is_long else nullcontext():
            request = await asyncio.to_thread(read_request, body, self.worker.tokenizer, self.model, self.limits, chat)
        self.worker.check_room(len(request.texts))  # before its grammar is compiled
        grammar = None if request.source is None else await self.grammars.get(request.source)
        if not self.worker.is_alive():
            raise RequestError("the engine has ended: see the server's log", 503)
        tenant = hashlib.sha256(http.headers.get("authorization", "").encode()).hexdigest()
        texts = [replace(text, grammar=grammar, tenant=tenant) for text in request.texts]
        return Pending(http, replace(request, texts=texts), self.worker, self.metrics, self.token_texts, chat)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Count an error and return its response; Starlette raises one of the server itself again for the log."""
        if isinstance(error, HTTPException):  # an unknown path, or a method that is not allowed
            line = f"{request.method} {shown(request.url.path)}: {error.detail}"
            return refuse(line, error.status_code, error.headers)
        is_refused = isinstance(error, RequestError) and not isinstance(error, TextFailed)
        self.metrics.count_end("refused" if is_refused else "error")
        if isinstance(error, RequestError):
            return refuse(str(error), error.status)
        return refuse(f"the server failed ({type(error).__name__}): see its log", 500)


def make_server(
    settings: ServerSettings,
    name: str,
    models: tuple[Any, Any, Any],
    drafter: Drafter | None,
    policies: Mapping[str, LossyPolicy],
) -> Server:
    """Return a server. `name`: what clients call the model; `models`: target, draft and tokenizer.

    Raises: `ValueError` or `TypeError`, one line, for what cannot run together.
    """
    target, draft, _ = models
    limits = RequestLimits(policies, settings.max_new_tokens, find_longest(target, draft, settings.max_length))
    worker = Worker(models, policies, settings.batch_size, settings.max_waiting, drafter)
    worker.check_settings()
    bounds = Bounds(count_connections(settings.batch_size + settings.max_waiting), grace=settings.grace)
    return Server(worker, name, limits, settings.api_key, bounds)


def read_policies(names: str) -> dict[str, LossyPolicy]:
    """Return policies, which have commas between them, by the names that requests use: a file or folder by its name, a short form unchanged."""
    chosen: dict[str, LossyPolicy] = {}
    for text in split_policies(names):
        name = Path(text).name if os.path.exists(text) else text  # False for JSON that is too long for a path
        if name in chosen:
            raise ValueError(f"policies: two of them are called {shown(name)}: name each once, or rename a file")
        chosen[name] = as_policy(text)
    return chosen
