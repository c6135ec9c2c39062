"""A request being processed: its texts are combined into one answer or streamed as they are written."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from ..artifacts.json_io import JSONObject
from ..generation.output import Result
from ..validation import one_line
from .bodies import RequestError, format_event, make_error
from .detokenize import AnswerLogprobs, AnswerText, TextChanged, TokenTexts
from .http import wait_for_hang_up
from .requests import ClientRequest, CompletionRequest
from .responses import CompletionResponse, Metrics, make_usage
from .tool_calls import CallReader
from .worker import Failure, LatestEvents, Progress


log = logging.getLogger("hf_lossy_assist.server")


class TextFailed(RequestError):
    """A text that cannot be written. Its error is logged, unless `generate` refused the request or the server is shutting down."""

    def __init__(self, error: Exception):
        super().__init__(one_line(str(error) or type(error).__name__, 400), getattr(error, "status", 500))
        if not isinstance(error, RequestError):
            log.error("a text was not written", exc_info=error)


class Choice:
    """One text of an answer."""

    def __init__(self, request: CompletionRequest, texts: TokenTexts, chat: bool):
        self.request = request
        self.text = AnswerText(texts.tokenizer, request.stops, request.ids)
        wanted = "logprobs" in request.arguments
        self.logprobs = AnswerLogprobs(self.text, request.ids, texts, chat) if wanted else None
        tools = request.tools
        self.calls = None if tools is None else CallReader(tools.form, tools.names)
        self.begun = False  # something of it was sent
        self.result: Result | None = None

    def find_end(self, result: Result) -> str:
        """Return why the text ended. Call it after all of it was read for calls."""
        if result.finish_reason == "length":
            return "length"
        return "tool_calls" if self.calls is not None and self.calls.calls and not self.calls.open else "stop"


@dataclass
class Pending:
    """A request whose texts are being written. jobs: their numbers."""

    http: Request
    request: ClientRequest
    choices: list[Choice]
    response: CompletionResponse
    metrics: Metrics
    events: LatestEvents
    jobs: Sequence[int]
    began: float
    over: bool = False  # none of its texts is being written any more

    async def next(self) -> tuple[int, Progress | Result]:
        """Return the next event, with the index of its text. Raises: `ClientDisconnect` or `TextFailed`."""
        came = asyncio.ensure_future(self.events.get())
        gone = asyncio.ensure_future(wait_for_hang_up(self.http))
        try:
            await asyncio.wait({came, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not came.done():
                raise ClientDisconnect
            index, event = came.result()
        finally:
            for task in (came, gone):
                task.cancel()
        if isinstance(event, Failure):
            raise TextFailed(event.error)
        if isinstance(event, Result):
            self.choices[index].result = event
            self.over = all(choice.result is not None for choice in self.choices)
        return index, event

    async def whole(self) -> JSONObject:
        """Return the whole answer. Raises: as `next`."""
        while not self.over:
            await self.next()
        return await asyncio.to_thread(self._join)

    def _join(self) -> JSONObject:
        choices = list[JSONObject]()
        for index, choice in enumerate(self.choices):
            assert choice.result is not None
            text = choice.text.more(choice.result.token_ids, last=True)
            logprobs = None
            if choice.logprobs is not None:
                found = choice.result.logprobs or []
                logprobs = choice.logprobs.more(choice.result.token_ids, found, last=True) or choice.logprobs.none()
            if choice.calls is not None:
                choice.calls.more(text, last=True)
            end = self._count(choice, choice.result)
            choices.append(self.response.choice(index, text, end, logprobs, choice.calls))
        return self.response.whole(choices, self._usage())

    async def stream(self, index: int, event: Progress | Result) -> AsyncIterator[str]:
        """Yield the pieces of the answer, beginning with those of `event`. Raises: `TextFailed`."""
        try:
            while True:
                for piece in self._pieces(index, event):
                    yield piece
                if self.over:
                    break
                index, event = await self.next()
            if self.request.include_usage:
                yield self.response.last(self._usage())
            yield format_event("[DONE]")
        except TextChanged as changed:
            yield format_event(make_error(str(changed), 500))
        except ClientDisconnect:
            return

    def _pieces(self, place: int, event: Progress | Result) -> list[str]:
        """Return what an event adds to a streamed text."""
        choice, last = self.choices[place], isinstance(event, Result)
        ids = event.token_ids if isinstance(event, Result) else event.ids
        text, out, found = choice.text.more(ids, last), list[str](), None
        deltas: list[JSONObject] = [{"content": text}] if text else []
        if choice.calls is not None:
            deltas = [*choice.calls.more(text, last)]
        if choice.logprobs is not None:
            found = choice.logprobs.more(ids, event.logprobs or [], last)
        for delta in deltas or ([{}] if found or (last and not choice.begun) else []):
            if not choice.begun:
                self.metrics.first_token.observe(time.perf_counter() - self.began)
            out.append(self.response.piece(place, delta, found, first=not choice.begun))
            choice.begun = True
        if isinstance(event, Result):
            out.append(self.response.piece(place, {}, end=self._count(choice, event)))
        return out

    def _count(self, choice: Choice, result: Result) -> str:
        """Count a finished text; return why it ended."""
        end = choice.find_end(result)
        self.metrics.count(result, len(choice.request.ids), end, time.perf_counter() - self.began)
        return end

    def _usage(self) -> dict[str, object]:
        each = len(self.choices) // self.request.prompts
        prompt = sum(len(choice.request.ids) for choice in self.choices[::each])
        results = [choice.result for choice in self.choices if choice.result is not None]
        return make_usage(results, prompt, self.request.texts[0].policy)
