"""The server's addresses: /v1/completions, /v1/chat/completions, /v1/models, /metrics and /health."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..generation.ended import Result
from ..validation import one_line, shown
from .answers import Answer, error, event, usage_of
from .connections import CLOSING_SECONDS, Bounds
from .engine import Engine, Event, Failed, Full, Latest, Written
from .fields import Refused
from .http import Bodies, Pieces, hang_up, presents, refusal, unserved
from .metrics import Metrics
from .questions import Limits, Question, read_question
from .texts import Changed, Text


NO_KEY = "the API key is wrong, or missing"
GONE = 499  # as nginx says that the client hung up; nobody hears it
log = logging.getLogger("hf_lossy_assist.server")


@dataclass
class Asked:
    """A request whose text is being written."""

    request: Request
    question: Question
    answer: Answer
    events: Latest
    number: int
    began: float
    over: bool = False  # nothing of it is written any more


class Server:
    """Answers requests with what `engine` writes.

    Args:
        model: its name for clients. limits: what they may ask for. key: what they must present; None: nothing.
        bounds: what they may take.
    """

    def __init__(
        self, engine: Engine, model: str, limits: Limits, key: str | None = None, bounds: Bounds | None = None
    ):
        self.engine, self.model, self.limits, self.key = engine, model, limits, key
        self.bounds = bounds or Bounds()
        self.bodies = Bodies(self.bounds.bodies)
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
            await asyncio.to_thread(self.engine.stop, CLOSING_SECONDS)

        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/metrics", self.show_metrics),
            Route("/health", self.health),
        ]
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: unserved})

    def give_up(self) -> None:
        """End the texts that are being written, and say so to their clients."""
        self.engine.give_up(Refused("the server ended before the text did: ask again", 503))

    async def completions(self, request: Request) -> Response:
        """A prompt continued."""
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """A conversation continued."""
        return await self._answer(request, chat=True)

    async def models(self, request: Request) -> Response:
        """The one model, in a list or by its name, with the policies that requests may name."""
        if not self._may(request):
            return refusal(NO_KEY, 401)
        its = {"id": self.model, "object": "model", "created": self.began, "owned_by": "hf_lossy_assist"}
        its |= {"lossy_policies": list(self.limits.policies)}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [its]})
        if name != self.model:
            return refusal(f"model: this server has {self.model!r}, got {shown(name)}", 404)
        return JSONResponse(its)

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
            return refusal(str(refused), refused.status)
        except ClientDisconnect:
            return Response(status_code=GONE)
        over = False
        try:
            first = await self._next(asked)
            if isinstance(first, Failed):
                over = True
                return refusal(*self._failure(first))
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
            raise Refused(NO_KEY, 401)
        body = await self.bodies.read(request)
        question = await asyncio.to_thread(read_question, body, self.tokenizer, self.model, self.limits, chat)
        if not self.engine.is_alive():
            raise Refused("the engine has ended: see the server's log", 503)
        events, began = Latest(), time.perf_counter()
        try:
            number = self.engine.ask(question, events.tell)
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
                    yield self._piece(asked, piece, first)
                    first = False
                came = await self._next(asked)
            asked.over = True
            if isinstance(came, Failed):
                yield event(error(*self._failure(came)))
                return
            piece, end = text.more(came.token_ids, last=True), self._end(asked, came, text)
            if piece or first:
                yield self._piece(asked, piece, first)
            yield asked.answer.piece("", end)
            usage = self._usage(asked, came, end)
            if asked.question.usage:
                yield asked.answer.last(usage)
            yield event("[DONE]")
        except Changed as changed:
            yield event(error(str(changed), 500))
        except ClientDisconnect:
            return

    def _piece(self, asked: Asked, piece: str, first: bool) -> str:
        if first:
            self.metrics.first.observe(time.perf_counter() - asked.began)
        return asked.answer.piece(piece, first=first)

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

    def _failure(self, failed: Failed) -> tuple[str, int]:
        """Count a text that was not written; returns what its client is told, and the status."""
        self.metrics.requests.labels("failed").inc()
        if isinstance(failed.error, Refused):  # the server ends, and nothing is broken
            return str(failed.error), failed.error.status
        log.error("a text was not written", exc_info=failed.error)
        wrong = isinstance(failed.error, ValueError | TypeError)  # what `generate` refuses
        return one_line(str(failed.error) or type(failed.error).__name__, 400), 400 if wrong else 500

    def _may(self, request: Request) -> bool:
        return self.key is None or presents(request, self.key)


def _ends(target: Any) -> set[int]:
    ends = target.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}
