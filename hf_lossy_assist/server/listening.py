"""Where the server listens and how it ends; what it reads of a request, and how it hears that nobody waits any more."""

import json
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.requests import Request

from ..validation import one_line
from .questions import Refused


MOST_BYTES = 4 * 2**20  # of a request's body


def listen(app: Any, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that are under way are answered first. `tell`: is given the address once it is open.

    Raises: `OSError`, one line, where the address cannot be had.
    """
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", lifespan="on", ws="none")
    try:
        socket = config.bind_socket()
    except SystemExit:  # uvicorn has said why
        raise OSError(f"--host {one_line(host)} --port {port} cannot be listened at: is it in use?") from None
    try:
        shown = f"[{host}]" if ":" in host else host
        tell(f"http://{shown}:{socket.getsockname()[1]}/v1")
        uvicorn.Server(config).run(sockets=[socket])
    except KeyboardInterrupt:  # the signal that ended it, raised once more behind its end
        pass
    finally:
        socket.close()


async def read_body(request: Request) -> Any:
    """The JSON of a request, which is not read beyond `MOST_BYTES`."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BYTES:
            raise Refused(f"the body is longer than {MOST_BYTES} bytes", 413)
    try:
        return json.loads(bytes(data))
    except (ValueError, RecursionError) as wrong:
        raise Refused(f"the body is not JSON: {one_line(str(wrong), 200)}") from None


async def hang_up(request: Request) -> None:
    """Until the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
