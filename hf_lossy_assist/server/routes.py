"""The server's routes: /v1/completions, /v1/chat/completions, /v1/models, /metrics and /health."""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..models.introspection import end_tokens
from ..validation import one_line, shown
from .answers import Answerer, Pending
from .fields import RequestError, RequestLimits, format_event, make_error
from .grammars import Grammars
from .http import (
    CLOSING_SECONDS,
    FREE_BYTES,
    MOST_BYTES,
    BodyReader,
    Bounds,
    EventStream,
    presents_key,
    refuse,
    refuse_path,
)
from .requests import read_request
from .responses import CompletionResponse, Metrics
from .token_logprobs import TokenTexts
from .worker import Event, Failure, LatestEvents, QueueFull, Worker


NO_KEY = "the API key is wrong, or missing"
FULL = "too many requests are waiting: try again later"
GONE = 499  # nginx's status for a client that disconnected; nobody receives it
log = logging.getLogger("hf_lossy_assist.server")


class Server:
    """Answers requests with texts written by `worker`.

    Args:
        model: its name for clients. limits: on their requests. key: the API key they must present; None: none.
        bounds: limits on their use of resources.
    """

    def __init__(
        self, worker: Worker, model: str, limits: RequestLimits, key: str | None = None, bounds: Bounds | None = None
    ):
        self.worker, self.model, self.key = worker, model, key
        self.limits = replace(limits, most_texts=min(limits.most_texts, worker.most))
        self.bounds = bounds or Bounds()
        self.bodies, self.long_bodies = BodyReader(self.bounds.bodies), asyncio.Semaphore(1)
        self.tokenizer = worker.tokenizer
        self.metrics = Metrics(lambda: worker.load, model)
        self.grammars = Grammars(worker.tokenizer, end_tokens(worker.target.generation_config))
        self.answerer = Answerer(worker.tokenizer, TokenTexts(worker.tokenizer), self.metrics)
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
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/metrics", self.show_metrics),
            Route("/health", self.health),
        ]
        return Starlette(
            routes=routes,
            lifespan=lifespan,
            exception_handlers={HTTPException: refuse_path, Exception: self._refuse_unknown},
        )

    def give_up(self) -> None:
        """End the texts being written, and tell their clients."""
        self.worker.give_up(RequestError("the server ended before the text did: ask again", 503))

    async def completions(self, request: Request) -> Response:
        """Continue a prompt."""
        return await self._respond(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._respond(request, chat=True)

    async def models(self, request: Request) -> Response:
        """Return the one model, in a list or by name, with the policies that requests may name."""
        if not self._is_allowed(request):
            return refuse(NO_KEY, 401)
        model = {"id": self.model, "object": "model", "created": self.began, "owned_by": "hf_lossy_assist"}
        model |= {"lossy_policies": list(self.limits.policies)}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name != self.model:
            return refuse(f"model: this server has {self.model!r}, got {shown(name)}", 404)
        return JSONResponse(model)

    async def show_metrics(self, request: Request) -> Response:
        """Return the page for Prometheus."""
        page, kind = self.metrics.page()
        return Response(page, media_type=kind)

    async def health(self, request: Request) -> Response:
        """Return 200 while texts can be written."""
        return Response(status_code=200 if self.worker.is_alive() else 503)

    def _is_allowed(self, request: Request) -> bool:
        return self.key is None or presents_key(request, self.key)

    # -- one request --------------------------------------------------------------------------------------------------

    async def _respond(self, http: Request, chat: bool) -> Response:
        try:
            pending = await self._submit(http, chat)
        except RequestError as error:
            self.metrics.requests.labels("refused").inc()
            return refuse(str(error), error.status)
        except ClientDisconnect:
            return Response(status_code=GONE)
        try:
            if not pending.request.stream:
                answer = await pending.whole()
                return self._fail(pending, answer) if isinstance(answer, Failure) else JSONResponse(answer)
            place, first = await pending.next()
            if isinstance(first, Failure):
                return self._fail(pending, first)
        except ClientDisconnect:
            self._cancel(pending)
            return Response(status_code=GONE)
        except BaseException as error:
            if isinstance(error, Exception):
                self._end(pending)  # counted as failed
            self._cancel(pending)
            raise
        return EventStream(self._stream(pending, place, first), lambda: self._cancel(pending))

    async def _submit(self, http: Request, chat: bool) -> Pending:
        if not self._is_allowed(http):
            raise RequestError(NO_KEY, 401)
        body = await self.bodies.read(http)
        self._refuse_if_full(1)
        # Long bodies are read one after the other, so that short ones find a thread.
        async with (
            self.long_bodies if int(http.headers.get("content-length", MOST_BYTES)) > FREE_BYTES else nullcontext()
        ):
            request = await asyncio.to_thread(read_request, body, self.tokenizer, self.model, self.limits, chat)
        self._refuse_if_full(len(request.texts))  # before its grammar is compiled
        if request.source is not None:
            grammar = await self.grammars.get(request.source)
            request = replace(request, texts=[replace(text, grammar=grammar) for text in request.texts])
        if not self.worker.is_alive():
            raise RequestError("the engine has ended: see the server's log", 503)
        tenant = hashlib.sha256(http.headers.get("authorization", "").encode()).hexdigest()
        request = replace(request, texts=[replace(text, tenant=tenant) for text in request.texts])
        events, began = LatestEvents(), time.perf_counter()
        try:
            numbers = self.worker.submit(request.texts, events.tell)
        except QueueFull:
            raise RequestError(FULL, 429) from None
        return Pending(http, request, CompletionResponse(self.model, chat), self.answerer, events, numbers, began)

    def _refuse_if_full(self, texts: int) -> None:
        if not self.worker.has_room(texts):
            raise RequestError(FULL, 429)

    async def _stream(self, pending: Pending, place: int, first: Event) -> AsyncIterator[str]:
        try:
            async for piece in pending.stream(place, first):
                if isinstance(piece, Failure):
                    message, status = self._count_failure(piece)
                    self._end(pending)
                    piece = format_event(make_error(message, status))
                yield piece
        except Exception:
            self._end(pending)  # counted as failed
            raise

    async def _refuse_unknown(self, request: Request, error: Exception) -> Response:
        """Count an error of the server itself and return its response; Starlette raises it again for the log."""
        self.metrics.requests.labels("failed").inc()
        return refuse(f"the server failed ({type(error).__name__}): see its log", 500)

    def _fail(self, pending: Pending, failure: Failure) -> Response:
        """End a request of which a text cannot be written."""
        self._end(pending)
        return refuse(*self._count_failure(failure))

    def _cancel(self, pending: Pending) -> None:
        """End a request whose client has disconnected."""
        if not pending.over:
            self._end(pending)
            self.metrics.requests.labels("cancelled").inc()

    def _end(self, pending: Pending) -> None:
        pending.over = True
        for number in pending.numbers:
            self.worker.cancel(number)

    def _count_failure(self, failure: Failure) -> tuple[str, int]:
        """Count a text that failed; return the message for its client, and the status."""
        self.metrics.requests.labels("failed").inc()
        if isinstance(failure.error, RequestError):  # refused by `generate`, or the server is shutting down
            return str(failure.error), failure.error.status
        log.error("a text was not written", exc_info=failure.error)
        return one_line(str(failure.error) or type(failure.error).__name__, 400), 500
