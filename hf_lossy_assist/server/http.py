"""HTTP with limits: on what is read of a request, on stalled clients, and on the time for shutting down."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..validation import one_line
from .bodies import RequestError, make_error


MOST_BYTES = 4 * 2**20  # of a request's body
FREE_BYTES = 64 * 2**10  # of each body, exempt from the limit on all, so that stalled bodies do not block small ones
MOST_OTHERS = 512  # connections in addition to those of the allowed requests
BACKLOG = 128  # connections that the system queues until they are accepted; asyncio accepts as many at a time
DISCARDING = 1.0  # seconds for a body that is announced as too long: closing with bytes unread would lose the answer
CLOSING_SECONDS = 3  # during shutdown, for reading a reply and for the worker's last round


@dataclass(frozen=True)
class Bounds:
    """Limits on what clients may use.

    Args:
        connections: open at a time. bodies: bytes of bodies being read, over all requests, beyond the first 64 KB of each.
        reading: seconds for a request's head to arrive, and for its body. writing: seconds for which a client may read nothing of a reply.
        grace: seconds for unfinished requests at shutdown.
    """

    connections: int = 512
    bodies: int = 64 * 2**20
    reading: float = 30
    writing: float = 30
    grace: float = 30


class BodyReader:
    """Reads the bodies of requests, within the bounds of one and of all together."""

    def __init__(self, bounds: Bounds):
        self.bounds, self.bytes = bounds, 0  # of all bodies beyond the first `FREE_BYTES` of each

    async def read(self, request: Request) -> object:
        """Read the JSON of a request. Raises: `RequestError` if it is too long (announced, or read), too slow, or not JSON."""
        is_long = int(request.headers.get("content-length", 0)) > MOST_BYTES
        data = bytearray()
        try:
            await asyncio.wait_for(self._read(request, data), DISCARDING if is_long else self.bounds.reading)
        except asyncio.TimeoutError:
            if not is_long:
                late = f"the request did not come in full within {self.bounds.reading:g} seconds"
                raise RequestError(late, 408) from None
        finally:
            self.bytes -= max(len(data) - FREE_BYTES, 0)
        if is_long or len(data) > MOST_BYTES:
            raise RequestError(f"the body is longer than {MOST_BYTES} bytes", 413)
        try:
            return from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise RequestError(f"the body is not JSON: {one_line(str(error), 200)}") from None

    async def _read(self, request: Request, data: bytearray) -> None:
        """Add what is read of a body to `data`; the rest of one that is too long is only read."""
        async for chunk in request.stream():
            if len(data) > MOST_BYTES:
                continue
            more = max(len(data) + len(chunk) - FREE_BYTES, 0) - max(len(data) - FREE_BYTES, 0)
            if self.bytes + more > self.bounds.bodies:
                raise RequestError("too many long bodies are being read: try again later", 503)
            data += chunk
            self.bytes += more


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


def refuse(message: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response to a refused request."""
    again = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse(make_error(message, status), status, {**(headers or {}), **again})


class Connection(H11Protocol):
    """uvicorn's HTTP connection, which is closed if the head of a request does not arrive in time, or a reply is not read."""

    def __init__(self, bounds: Bounds, **settings: Any):
        super().__init__(**settings)
        self.bounds = bounds
        self.reading: asyncio.TimerHandle | None = None
        self.writing: asyncio.TimerHandle | None = None  # while a reply is not being read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` is called as soon as a reply is not read
        self._await_request()
        if len(self.connections) > self.bounds.connections:
            transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def _await_request(self) -> None:
        """Close the connection unless the head of a request has come in time, whose answer has begun or is awaited then."""
        _stop_clock(self.reading)
        self.reading = self.loop.call_later(self.bounds.reading, self._close_idle)

    def _close_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is h11.IDLE:  # otherwise uvicorn's method raises
            super().send_400_response(msg)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.writing = self.loop.call_later(self.bounds.writing, self.transport.abort)

    def resume_writing(self) -> None:
        _stop_clock(self.writing)
        super().resume_writing()

    def shutdown(self) -> None:
        """Complete an answer in progress, then close; at once if its request is incomplete, soon if it is not being read."""
        if self.flow.write_paused:
            _stop_clock(self.writing)
            self.writing = self.loop.call_later(CLOSING_SECONDS, self.transport.abort)
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
            self.transport.abort()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop_clock(self.reading)
        _stop_clock(self.writing)
        super().connection_lost(exc)


def _stop_clock(clock: asyncio.TimerHandle | None) -> None:
    if clock is not None:
        clock.cancel()


def listen(
    app: Starlette, bounds: Bounds, give_up: Callable[[], None], host: str, port: int, tell: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the requests in progress. `give_up`: ends the texts in progress; `tell`: called with the open address.

    Raises: `OSError`, one line, if the address is not available.
    """
    server = BoundedUvicorn(app, bounds, give_up)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
        except (OSError, OverflowError):
            raise OSError(f"--host {one_line(host)} --port {port} cannot be listened at: is it in use?") from None
        address = f"[{host}]" if ":" in host else host
        tell(f"http://{address}:{listening.getsockname()[1]}/v1")
        with suppress(KeyboardInterrupt):  # the signal that ended the server, raised again after shutdown
            server.run(sockets=[listening])


class BoundedUvicorn(uvicorn.Server):
    """uvicorn for a text server, within its limits."""

    def __init__(self, app: Starlette, bounds: Bounds, give_up: Callable[[], None]):
        http: Any = partial(Connection, bounds)
        last = int(bounds.grace) + CLOSING_SECONDS
        super().__init__(
            uvicorn.Config(
                app,
                http=http,
                ws="none",
                lifespan="on",
                log_level="error",
                backlog=BACKLOG,
                timeout_graceful_shutdown=last,
            )
        )
        self.grace, self.give_up, self.hurries = bounds.grace, give_up, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down; at a second signal without grace."""
        self.hurries = self.should_exit
        if not self.hurries:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        late = asyncio.ensure_future(self._end_late())
        await super().shutdown(sockets)
        late.cancel()

    async def _end_late(self) -> None:
        """End the texts that outlast the grace, and later the connections of clients that do not read why."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.grace
        while loop.time() < deadline and not self.hurries:
            await asyncio.sleep(0.1)
        self.give_up()
        await asyncio.sleep(CLOSING_SECONDS / 2)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def count_connections(requests: int) -> int:
    """Return how many connections a server for so many requests may have open: at most half the files that it may open."""
    most = requests + MOST_OTHERS
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return most
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // 2)
