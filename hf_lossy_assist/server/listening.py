"""Where the server listens and how it ends."""

import asyncio
import errno
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn

from ..validation import one_line
from .app import Server
from .connections import CLOSING_SECONDS, Connection, OncePerSecond


MOST_OTHERS = 512  # connections beside those of the requests that may be under way
BACKLOG = 128  # connections that the system holds until they are accepted; asyncio accepts as many at a time
once_per_second = OncePerSecond()
log = logging.getLogger("uvicorn.error")


def listen(server: Server, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that are under way are answered first. `tell`: is given the address once it is open.

    Raises: `OSError`, one line, where the address cannot be had.
    """
    its = BoundedUvicorn(server, host, port)
    try:
        socket = its.config.bind_socket()
    except SystemExit:  # uvicorn has said why
        raise OSError(f"--host {one_line(host)} --port {port} cannot be listened at: is it in use?") from None
    try:
        shown = f"[{host}]" if ":" in host else host
        tell(f"http://{shown}:{socket.getsockname()[1]}/v1")
        its.run(sockets=[socket])
    except KeyboardInterrupt:  # the signal that ended it, raised once more behind its end
        pass
    finally:
        socket.close()


class BoundedUvicorn(uvicorn.Server):
    """uvicorn for a server of texts, within its bounds."""

    def __init__(self, server: Server, host: str, port: int):
        self.texts, bounds = server, server.bounds
        http: Any = partial(Connection, bounds)
        net = (
            int(bounds.grace) + CLOSING_SECONDS
        )  # behind the bounds of `Connection`, which end all of it without a traceback each
        config = uvicorn.Config(
            server.app(), host=host, port=port, http=http, ws="none", lifespan="on", log_level="warning",
            backlog=BACKLOG, timeout_graceful_shutdown=net,
        )  # fmt: skip
        super().__init__(config)
        log.addFilter(once_per_second)

    async def startup(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_handle)
        await super().startup(sockets)

    async def shutdown(self, sockets: Any = None) -> None:
        late = asyncio.get_running_loop().call_later(self.texts.bounds.grace, self.texts.give_up)
        await super().shutdown(sockets)
        late.cancel()


def most_connections(requests: int) -> int:
    """Count the connections that a server with so many requests under way may have open: half the files that it may open, or fewer."""
    most = requests + MOST_OTHERS
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return most
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // 2)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log that no file is left in one line: asyncio tries again a second later, and has a traceback for each try."""
    if getattr(context.get("exception"), "errno", None) in (errno.EMFILE, errno.ENFILE):
        log.warning("a connection waits, for no more files may be opened: raise the limit (ulimit -n)")
    else:
        loop.default_exception_handler(context)
