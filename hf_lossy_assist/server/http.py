"""What the server reads of a request, how it hears that nobody waits any more, and how a text is sent as it is written."""

import hmac
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..validation import one_line, shown
from .answers import error
from .fields import Refused


MOST_BYTES = 4 * 2**20  # of a request's body
FREE_BYTES = (
    64 * 2**10
)  # of each body that do not count for the bound on all of them: a stalled body stops no small one


class Bodies:
    """The bodies that are being read: `most` bytes of all of them together, beyond the first `FREE_BYTES` of each."""

    def __init__(self, most: int):
        self.most, self.held = most, 0

    async def read(self, request: Request) -> Any:
        """Read the JSON of a request. Raises: `Refused`, where it has more bytes than there is room for, or is no JSON."""
        data, held = bytearray(), 0
        try:
            async for chunk in request.stream():
                data += chunk
                if len(data) > MOST_BYTES:
                    raise Refused(f"the body is longer than {MOST_BYTES} bytes", 413)
                more = max(len(data) - FREE_BYTES, 0) - held
                if self.held + more > self.most:
                    raise Refused("too many long bodies are being read: try again later", 503)
                held, self.held = held + more, self.held + more
            return json.loads(data)
        except (ValueError, RecursionError) as wrong:
            if isinstance(wrong, Refused):
                raise
            raise Refused(f"the body is not JSON: {one_line(str(wrong), 200)}") from None
        finally:
            self.held -= held


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


async def hang_up(request: Request) -> None:
    """Until the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def presents(request: Request, key: str) -> bool:
    """Say whether a request presents the key; the scheme's name, Bearer, has any letter case."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())


def refusal(message: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to a request that gets no text."""
    again = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse(error(message, status), status, {**(headers or {}), **again})


async def unserved(request: Request, wrong: Exception) -> Response:
    """The answer to an address or a method that is not served."""
    assert isinstance(wrong, HTTPException)
    return refusal(f"{request.method} {shown(request.url.path)}: {wrong.detail}", wrong.status_code, wrong.headers)
