"""The server's addresses: /v1/completions, /v1/chat/completions, /v1/models, /metrics and /health."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..generation.ended import Result
from ..validation import one_line
from .answers import Answer, error, event, usage_of
from .engine import Engine, Event, Failed, Full, Written
from .listening import hang_up, read_body
from .metrics import Metrics
from .questions import Limits, Question, Refused, read_question
from .texts import Changed, Text


GONE = 499  # as nginx says that the client hung up; nobody hears it
log = logging.getLogger("hf_lossy_assist.server")


@dataclass
class Asked:
    """A request whose text is being written."""

    request: Request
    question: Question
    answer: Answer
    events: "asyncio.Queue[Event]"
    number: int
    began: float
    over: bool = False  # nothing of it is written any more


class Pieces(StreamingResponse):
    """A text sent as it is written. `ended` is called behind it, also where the client left before its first byte."""

    def __init__(self, pieces: AsyncIterator[str], ended: Callable[[], None]):
        super().__init__(pieces, media_type="text/event-stream")
        self.ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


class Server:
    """Answers requests with what `engine` writes.

    Args:
        model: its name for clients. limits: what they may ask for. key: what they must present; None: nothing.
    """

    def __init__(self, engine: Engine, model: str, limits: Limits, key: str | None = None):
        self.engine, self.model, self.limits, self.key = engine, model, limits, key
        self.tokenizer = engine.tokenizer
        self.ends = _ends(engine.target)
        self.metrics = Metrics(lambda: engine.load)
        self.began = int(time.time())

    def app(self) -> Starlette:
        """The application; its engine runs from its start to its end, at which what is being written is written to its end."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.engine.start()
            yield
            await asyncio.to_thread(self.engine.stop)

        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/metrics", self.show_metrics),
            Route("/health", self.health),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def completions(self, request: Request) -> Response:
        """A prompt continued."""
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """A conversation continued."""
        return await self._answer(request, chat=True)

    async def models(self, request: Request) -> Response:
        """The one model, with the policies that requests may name."""
        if not self._may(request):
            return _refusal("the API key is wrong, or missing", 401)
        its = {"id": self.model, "object": "model", "created": self.began, "owned_by": "hf_lossy_assist"}
        return JSONResponse({"object": "list", "data": [its | {"lossy_policies": list(self.limits.policies)}]})

    async def show_metrics(self, request: Request) -> Response:
        """Prometheus' page."""
        page, kind = self.metrics.page()
        return Response(page, media_type=kind)

    async def health(self, request: Request) -> Response:
        """200 while texts can be written."""
        return Response(status_code=200 if self.engine.is_alive() else 503)

    # -- one request --------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, chat: bool) -> Response:
        try:
            asked = await self._ask(request, chat)
        except Refused as refused:
            self.metrics.requests.labels("refused").inc()
            return _refusal(str(refused), refused.status)
        except ClientDisconnect:
            return Response(status_code=GONE)
        over = False
        try:
            first = await self._next(asked)
            if isinstance(first, Failed):
                over = True
                return self._failure(first)
            if asked.question.stream:
                over = True  # the stream's own affair from here on
                return Pieces(self._stream(asked, first), lambda: None if asked.over else self._cancel(asked))
            assert isinstance(first, Result), "a text that is not streamed has one event"
            over = True
            return JSONResponse(self._whole(asked, first))
        except ClientDisconnect:
            return Response(status_code=GONE)
        finally:
            if not over:
                self._cancel(asked)

    async def _ask(self, request: Request, chat: bool) -> Asked:
        if not self._may(request):
            raise Refused("the API key is wrong, or missing", 401)
        body = await read_body(request)
        question = await asyncio.to_thread(read_question, body, self.tokenizer, self.model, self.limits, chat)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(its: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody hears it
                loop.call_soon_threadsafe(events.put_nowait, its)

        if not self.engine.is_alive():
            raise Refused("the engine has ended: see the server's log", 503)
        began = time.perf_counter()
        try:
            number = self.engine.ask(question, tell)
        except Full:
            raise Refused("too many requests are waiting: try again later", 429) from None
        return Asked(request, question, Answer(self.model, chat), events, number, began)

    async def _next(self, asked: Asked) -> Event:
        """What becomes of a text. Raises: `ClientDisconnect` where nobody waits for it any more."""
        came, gone = asyncio.ensure_future(asked.events.get()), asyncio.ensure_future(hang_up(asked.request))
        try:
            await asyncio.wait({came, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not came.done():
                raise ClientDisconnect
            return came.result()
        finally:
            for task in (came, gone):
                task.cancel()

    def _whole(self, asked: Asked, result: Result) -> dict[str, Any]:
        text = Text(self.tokenizer, asked.question.stops, asked.question.ids)
        shown = text.more(result.token_ids, last=True)
        end = self._end(asked, result, text)
        return asked.answer.whole(shown, end, self._usage(asked, result, end))

    async def _stream(self, asked: Asked, came: Event) -> AsyncIterator[str]:
        text, first = Text(self.tokenizer, asked.question.stops, asked.question.ids), True
        try:
            while isinstance(came, Written):
                if piece := text.more(came.ids):
                    if first:
                        self.metrics.first.observe(time.perf_counter() - asked.began)
                    yield asked.answer.piece(piece, first=first)
                    first = False
                came = await self._next(asked)
            asked.over = True
            if isinstance(came, Failed):
                yield event(error(self._said(came), 500))
                return
            piece, end = text.more(came.token_ids, last=True), self._end(asked, came, text)
            if piece or first:
                yield asked.answer.piece(piece, first=first)
            yield asked.answer.piece("", end)
            usage = self._usage(asked, came, end)
            if asked.question.usage:
                yield asked.answer.last(usage)
            yield event("[DONE]")
        except Changed as changed:
            yield event(error(str(changed), 500))
        except ClientDisconnect:
            return

    def _usage(self, asked: Asked, result: Result, end: str) -> dict[str, Any]:
        prompt = len(asked.question.ids)
        self.metrics.count(result, prompt, end, time.perf_counter() - asked.began)
        return usage_of(result, prompt, asked.question.policy)

    def _end(self, asked: Asked, result: Result, text: Text) -> str:
        """Why a text ended: "length" where it had no room for more."""
        ids = result.token_ids
        full = len(ids) >= asked.question.own["max_new_tokens"] and ids[-1] not in self.ends
        return "length" if full and not text.stopped else "stop"

    def _cancel(self, asked: Asked) -> None:
        self.engine.cancel(asked.number)
        self.metrics.requests.labels("cancelled").inc()

    def _failure(self, failed: Failed) -> Response:
        wrong = isinstance(failed.error, ValueError | TypeError)  # what `generate` refuses
        return _refusal(self._said(failed), 400 if wrong else 500)

    def _said(self, failed: Failed) -> str:
        self.metrics.requests.labels("failed").inc()
        log.error("a text was not written", exc_info=failed.error)
        return one_line(str(failed.error) or type(failed.error).__name__, 400)

    def _may(self, request: Request) -> bool:
        if self.key is None:
            return True
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self.key.encode())


def _refusal(message: str, status: int) -> Response:
    headers = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse(error(message, status), status, headers)


def _ends(target: Any) -> set[int]:
    ends = target.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}
