"""uvicorn's HTTP connections with bounds, so that clients who stall hold up neither the server nor its end."""

import asyncio
import json
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .answers import error


MOST_AHEAD = 64 * 2**10  # bytes of further requests before one is answered
CLOSING_SECONDS = 3  # for a reply to be read further once the server ends, and for the engine's last round


@dataclass(frozen=True)
class Bounds:
    """How much clients may take of the server.

    Args:
        connections: open at a time. bodies: bytes of bodies that are being read, of all requests, beyond the first 64 KB of each.
        reading: seconds for a request to come in full, heads and body. writing: seconds in which nothing of a reply is read.
        grace: seconds for requests that are under way once the server ends.
    """

    connections: int = 512
    bodies: int = 64 * 2**20
    reading: float = 30
    writing: float = 30
    grace: float = 30


class Connection(H11Protocol):
    """An HTTP connection with bounds on its reading and writing."""

    def __init__(self, bounds: Bounds, **uvicorns: Any):
        super().__init__(**uvicorns)
        self.bounds = bounds
        self.ahead = 0  # bytes behind the request that is being answered
        self.ending = False
        self.reading: asyncio.TimerHandle | None = None  # runs while a request has come in part
        self.writing: asyncio.TimerHandle | None = None  # runs while a reply is not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` says at once that a reply is not read
        if len(self.connections) > self.bounds.connections:
            self.logger.warning("%d connections are open: further ones are closed", self.bounds.connections)
            self.refuse(503, "too many connections: try again later")
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.DONE:  # uvicorn keeps what comes before the answer without bound
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
        """Run the clock of `reading` from a request's first byte (a connection's beginning) to its last."""
        idle = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is not None
        if idle or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self.reading = _stopped(self.reading)
        elif self.reading is None and not self.transport.is_closing():
            message = f"the request did not come in full within {self.bounds.reading:g} seconds"
            self.reading = self.loop.call_later(self.bounds.reading, self.refuse, 408, message)

    def refuse(self, status: int, message: str) -> None:
        """Answer a request that is not read any further, unless its answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error(message, status)).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        if self.cycle is not None:  # the application hears that nobody waits for its answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.reading = _stopped(self.reading)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, msg)  # uvicorn's raises where an answer has begun

    def pause_writing(self) -> None:
        super().pause_writing()
        seconds = min(self.bounds.writing, CLOSING_SECONDS) if self.ending else self.bounds.writing
        self.writing = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self.writing = _stopped(self.writing)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reading, self.writing = _stopped(self.reading), _stopped(self.writing)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End: an answer that is under way is written first, a request that has come in part is refused."""
        self.ending = True
        if self.writing is not None:
            self.writing = _stopped(self.writing)
            self.pause_writing()
        if self.reading is not None:
            self.refuse(503, "the server is ending")
        else:
            super().shutdown()


def _stopped(clock: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if clock is not None:
        clock.cancel()
    return None


class OncePerSecond(logging.Filter):
    """Let each message through once a second: clients must not fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, float] = {}  # by the message without its arguments

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created - self.last.get(record.msg, 0.0) >= 1:
            self.last[record.msg] = record.created
            return True
        return False
