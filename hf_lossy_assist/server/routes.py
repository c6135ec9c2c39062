"""The server's addresses: /v1/completions, /v1/chat/completions, /v1/models, /metrics and /health."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..generation.finished_texts import Result
from ..models.introspection import end_tokens
from ..validation import one_line, shown
from .detokenize import AnswerText, TextChanged
from .http import CLOSING_SECONDS, BodyReader, Bounds, EventStream, presents_key, refuse, refuse_path, wait_for_hang_up
from .requests import CompletionRequest, RequestError, RequestLimits, read_request
from .responses import CompletionResponse, Metrics, format_event, make_error, make_usage
from .worker import Event, Failure, LatestEvent, Progress, QueueFull, Worker


NO_KEY = "the API key is wrong, or missing"
GONE = 499  # nginx's status for a client that hung up; nobody hears it
log = logging.getLogger("hf_lossy_assist.server")


@dataclass
class Pending:
    """A request whose text is being written."""

    http: Request
    request: CompletionRequest
    response: CompletionResponse
    events: LatestEvent
    number: int
    began: float
    over: bool = False  # nothing of it is written any more


class Server:
    """Answers requests with what `worker` writes.

    Args:
        model: its name for clients. limits: what they may ask for. key: what they must present; None: nothing.
        bounds: what they may take.
    """

    def __init__(
        self, worker: Worker, model: str, limits: RequestLimits, key: str | None = None, bounds: Bounds | None = None
    ):
        self.worker, self.model, self.limits, self.key = worker, model, limits, key
        self.bounds = bounds or Bounds()
        self.bodies = BodyReader(self.bounds.bodies)
        self.tokenizer = worker.tokenizer
        self.ends = end_tokens(worker.target.generation_config)
        self.metrics = Metrics(lambda: worker.load)
        self.began = int(time.time())

    def app(self) -> Starlette:
        """Return the application. Its worker runs from its start to its end, at which what is being written is completed."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            yield
            await asyncio.to_thread(self.worker.stop, CLOSING_SECONDS)

        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/metrics", self.show_metrics),
            Route("/health", self.health),
        ]
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: refuse_path})

    def give_up(self) -> None:
        """End the texts that are being written, and tell their clients."""
        self.worker.give_up(RequestError("the server ended before the text did: ask again", 503))

    async def completions(self, request: Request) -> Response:
        """Continue a prompt."""
        return await self._respond(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._respond(request, chat=True)

    async def models(self, request: Request) -> Response:
        """Return the one model, in a list or by its name, with the policies that requests may name."""
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
        """Return Prometheus' page."""
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
            first = await self._next(pending)
            pending.over = not isinstance(first, Progress)
            if isinstance(first, Failure):
                return refuse(*self._count_failure(first))
            if not pending.request.stream:
                assert isinstance(first, Result), "a text that is not streamed has one event"
                text = self._make_text(pending)
                answer = text.more(first.token_ids, last=True)
                end = self._find_end(pending, first, text)
                return JSONResponse(pending.response.whole(answer, end, self._count(pending, first, end)))
        except BaseException as error:
            self._cancel(pending)
            if isinstance(error, ClientDisconnect):
                return Response(status_code=GONE)
            raise
        return EventStream(self._stream(pending, first), lambda: self._cancel(pending))

    async def _submit(self, http: Request, chat: bool) -> Pending:
        if not self._is_allowed(http):
            raise RequestError(NO_KEY, 401)
        body = await self.bodies.read(http)
        request = await asyncio.to_thread(read_request, body, self.tokenizer, self.model, self.limits, chat)
        if not self.worker.is_alive():
            raise RequestError("the engine has ended: see the server's log", 503)
        events, began = LatestEvent(), time.perf_counter()
        try:
            number = self.worker.submit(request, events.tell)
        except QueueFull:
            raise RequestError("too many requests are waiting: try again later", 429) from None
        return Pending(http, request, CompletionResponse(self.model, chat), events, number, began)

    async def _next(self, pending: Pending) -> Event:
        """Return the next event of a text. Raises: `ClientDisconnect` where nobody waits for it any more."""
        came = asyncio.ensure_future(pending.events.get())
        gone = asyncio.ensure_future(wait_for_hang_up(pending.http))
        try:
            await asyncio.wait({came, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not came.done():
                raise ClientDisconnect
            return came.result()
        finally:
            for task in (came, gone):
                task.cancel()

    def _make_text(self, pending: Pending) -> AnswerText:
        return AnswerText(self.tokenizer, pending.request.stops, pending.request.ids)

    async def _stream(self, pending: Pending, event: Event) -> AsyncIterator[str]:
        text, first = self._make_text(pending), True
        try:
            while isinstance(event, Progress):
                if piece := text.more(event.ids):
                    yield self._make_piece(pending, piece, first)
                    first = False
                event = await self._next(pending)
            pending.over = True
            if isinstance(event, Failure):
                yield format_event(make_error(*self._count_failure(event)))
                return
            piece, end = text.more(event.token_ids, last=True), self._find_end(pending, event, text)
            if piece or first:
                yield self._make_piece(pending, piece, first)
            yield pending.response.piece("", end)
            usage = self._count(pending, event, end)
            if pending.request.include_usage:
                yield pending.response.last(usage)
            yield format_event("[DONE]")
        except TextChanged as changed:
            yield format_event(make_error(str(changed), 500))
        except ClientDisconnect:
            return

    def _make_piece(self, pending: Pending, piece: str, first: bool) -> str:
        if first:
            self.metrics.first.observe(time.perf_counter() - pending.began)
        return pending.response.piece(piece, first=first)

    def _count(self, pending: Pending, result: Result, end: str) -> dict[str, object]:
        """Count a text that was written; return its usage."""
        prompt = len(pending.request.ids)
        self.metrics.count(result, prompt, end, time.perf_counter() - pending.began)
        return make_usage(result, prompt, pending.request.policy)

    def _find_end(self, pending: Pending, result: Result, text: AnswerText) -> str:
        """Return why a text ended: "length" where it had no room for more."""
        ids = result.token_ids
        full = len(ids) >= pending.request.arguments["max_new_tokens"] and ids[-1] not in self.ends
        return "length" if full and not text.stopped else "stop"

    def _cancel(self, pending: Pending) -> None:
        if not pending.over:
            self.worker.cancel(pending.number)
            self.metrics.requests.labels("cancelled").inc()

    def _count_failure(self, failure: Failure) -> tuple[str, int]:
        """Count a text that was not written; return the message for its client, and the status."""
        self.metrics.requests.labels("failed").inc()
        if isinstance(failure.error, RequestError):  # the server ends, and nothing is broken
            return str(failure.error), failure.error.status
        log.error("a text was not written", exc_info=failure.error)
        wrong = isinstance(failure.error, ValueError | TypeError)  # what `generate` refuses
        return one_line(str(failure.error) or type(failure.error).__name__, 400), 400 if wrong else 500
