"""HTTP with limits: on what is read of a request, on stalled clients, and on the time for shutting down."""

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import h11
import uvicorn
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..validation import one_line, shown
from .bodies import RequestError, make_error


MOST_BYTES = 4 * 2**20  # of a request's body
FREE_BYTES = 64 * 2**10  # of each body, exempt from the limit on all, so that stalled bodies do not block small ones
MOST_AHEAD = 64 * 2**10  # bytes of further requests before one is answered
MOST_OTHERS = 512  # connections in addition to those of the allowed requests
BACKLOG = 128  # connections that the system queues until they are accepted; asyncio accepts as many at a time
DISCARDING = 1.0  # seconds for the rest of a body that is refused
CLOSING_SECONDS = 3  # during shutdown, for reading a reply and for the worker's last round
log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Bounds:
    """Limits on what clients may use.

    Args:
        connections: open at a time. bodies: bytes of bodies being read, over all requests, beyond the first 64 KB of each.
        reading: seconds for a request to arrive completely, head and body. writing: seconds for which a client may read nothing of a reply.
        grace: seconds for unfinished requests at shutdown.
    """

    connections: int = 512
    bodies: int = 64 * 2**20
    reading: float = 30
    writing: float = 30
    grace: float = 30


class BodyReader:
    """Reads the bodies of requests, up to `most` bytes of all together beyond the first `FREE_BYTES` of each."""

    def __init__(self, most: int):
        self.most, self.held = most, 0

    async def read(self, request: Request) -> object:
        """Read the JSON of a request. Raises: `RequestError` if it is too long (announced, or read), or not JSON."""
        too_long = RequestError(f"the body is longer than {MOST_BYTES} bytes", 413)
        data, held, chunks = bytearray(), 0, request.stream()
        try:
            if int(request.headers.get("content-length", 0)) > MOST_BYTES:
                await discard(chunks)
                raise too_long
            async for chunk in chunks:
                data += chunk
                if len(data) > MOST_BYTES:
                    await discard(chunks)
                    raise too_long
                more = max(len(data) - FREE_BYTES, 0) - held
                if self.held + more > self.most:
                    raise RequestError("too many long bodies are being read: try again later", 503)
                held, self.held = held + more, self.held + more
            return from_json(data, allow_inf_nan=False)
        except RequestError:
            raise
        except ValueError as wrong:
            raise RequestError(f"the body is not JSON: {one_line(str(wrong), 200)}") from None
        finally:
            self.held -= held


async def discard(chunks: AsyncIterator[bytes]) -> None:
    """Read the rest of a refused body for a moment: closing a connection with bytes unread loses the answer."""

    async def rest() -> None:
        async for _ in chunks:
            pass

    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(rest(), DISCARDING)


class EventStream(StreamingResponse):
    """A streamed text. `ended` is called after it, even if the client disconnected before the first byte."""

    def __init__(self, pieces: AsyncIterator[str], ended: Callable[[], None]):
        super().__init__(pieces, media_type="text/event-stream")
        self.ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


async def wait_for_hang_up(request: Request) -> None:
    """Return once the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def presents_key(request: Request, key: str) -> bool:
    """Return whether a request presents the key; the scheme "Bearer" is case-insensitive."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())


def refuse(message: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response to a refused request."""
    again = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse(make_error(message, status), status, {**(headers or {}), **again})


async def refuse_path(request: Request, wrong: Exception) -> Response:
    """Return the response to an unknown path or a method that is not allowed."""
    assert isinstance(wrong, HTTPException)
    return refuse(f"{request.method} {shown(request.url.path)}: {wrong.detail}", wrong.status_code, wrong.headers)


class Connection(H11Protocol):
    """uvicorn's HTTP connection with limits on reading and writing."""

    def __init__(self, bounds: Bounds, **settings: Any):
        super().__init__(**settings)
        self.bounds = bounds
        self.ahead = 0  # bytes after the request being answered
        self.ending = False
        self.reading: asyncio.TimerHandle | None = None  # runs while a request has partly arrived
        self.writing: asyncio.TimerHandle | None = None  # runs while a reply is not being read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` is called as soon as a reply is not read
        if len(self.connections) > self.bounds.connections:
            self.logger.warning("%d connections are open: further ones are closed", self.bounds.connections)
            self.refuse(503, "too many connections: try again later")
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.DONE:  # uvicorn buffers what arrives before the answer without limit
            self.ahead += len(data)
        if self.ahead > MOST_AHEAD:
            self.refuse(413, f"more than {MOST_AHEAD} bytes of further requests before the answer to this one")
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self.ahead = 0
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Run the timer `reading` from a request's first byte (for the first: from the connection's start) to its last."""
        idle = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is not None
        if idle or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self.reading = _stop_clock(self.reading)
        elif self.reading is None and not self.transport.is_closing():
            message = f"the request did not come in full within {self.bounds.reading:g} seconds"
            self.reading = self.loop.call_later(self.bounds.reading, self.refuse, 408, message)

    def refuse(self, status: int, message: str) -> None:
        """Answer a request without reading the rest, unless its answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(make_error(message, status)).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        if self.cycle is not None:  # tells the application that the client is gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.reading = _stop_clock(self.reading)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, msg)  # uvicorn's method raises if an answer has begun

    def pause_writing(self) -> None:
        super().pause_writing()
        seconds = min(self.bounds.writing, CLOSING_SECONDS) if self.ending else self.bounds.writing
        self.writing = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self.writing = _stop_clock(self.writing)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reading, self.writing = _stop_clock(self.reading), _stop_clock(self.writing)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection: finish an answer in progress, but refuse a request that has only partly arrived."""
        self.ending = True
        if self.writing is not None:
            self.writing = _stop_clock(self.writing)
            self.pause_writing()
        if self.reading is not None:
            self.refuse(503, "the server is ending")
        else:
            super().shutdown()


def _stop_clock(clock: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if clock is not None:
        clock.cancel()
    return None


class OncePerSecond(logging.Filter):
    """Lets each message through at most once per second, so that clients cannot flood the log."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, float] = {}  # by message without arguments

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created - self.last.get(record.msg, 0.0) >= 1:
            self.last[record.msg] = record.created
            return True
        return False


once_per_second = OncePerSecond()


def listen(
    app: Starlette, bounds: Bounds, give_up: Callable[[], None], host: str, port: int, tell: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the requests in progress. `give_up`: ends the texts in progress; `tell`: called with the address once it is open.

    Raises: `OSError`, one line, if the address is not available.
    """
    bounded = BoundedUvicorn(app, bounds, give_up, host, port)
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError):
        listening.close()
        raise OSError(f"--host {one_line(host)} --port {port} cannot be listened at: is it in use?") from None
    try:
        address = f"[{host}]" if ":" in host else host
        tell(f"http://{address}:{listening.getsockname()[1]}/v1")
        bounded.run(sockets=[listening])
    except KeyboardInterrupt:  # the signal that ended the server, raised again after shutdown
        pass
    finally:
        listening.close()


class BoundedUvicorn(uvicorn.Server):
    """uvicorn for a text server, within its limits."""

    def __init__(self, app: Starlette, bounds: Bounds, give_up: Callable[[], None], host: str, port: int):
        self.grace, self.give_up = bounds.grace, give_up
        http: Any = partial(Connection, bounds)
        # Longer than the limits of `Connection`, which close all connections without tracebacks.
        last = int(bounds.grace) + CLOSING_SECONDS
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=http,
            ws="none",
            lifespan="on",
            log_level="warning",
            backlog=BACKLOG,
            timeout_graceful_shutdown=last,
        )
        super().__init__(config)
        log.addFilter(once_per_second)

    async def startup(self, sockets: Any = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down; at a second signal without the grace period."""
        if self.should_exit and self.started:
            self.loop.call_soon_threadsafe(self.give_up)
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        late = self.loop.call_later(self.grace, self.give_up)
        await super().shutdown(sockets)
        late.cancel()


def count_connections(requests: int) -> int:
    """Return how many connections a server for so many requests may have open: at most half the files that it may open."""
    most = requests + MOST_OTHERS
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return most
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // 2)
