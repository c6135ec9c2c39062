"""A bound on the seconds and bytes of one reply, whatever the server does: drip, or never end.

The HTTP client's own timeout starts again with every byte that comes, and it reads a body of any size. So the bound stands
where bytes come in, at the connection: that covers headers, TLS and proxies as well.
"""

import threading
import time
from importlib import import_module
from typing import Any


LARGEST = 16 << 20  # bytes of one reply with its headers: some hundred times the longest response


class TooMuch(ValueError):
    """The reply is larger than any that the API gives, or may become so."""


class Bound(threading.local):
    """What is left for the reply that this thread waits for."""

    deadline = float("inf")  # time.monotonic()
    room = LARGEST

    def start(self, seconds: float) -> None:
        """A new request begins."""
        self.deadline, self.room = time.monotonic() + seconds, LARGEST

    def seconds(self, given: float | None) -> float:
        """Seconds to wait for the next bytes, where the client itself would wait `given`."""
        left = self.deadline - time.monotonic()
        return left if given is None else min(given, left)

    def take(self, data: bytes) -> bytes:
        self.room -= len(data)
        if self.room < 0:
            raise TooMuch(f"sent more than {LARGEST >> 20} MiB in one reply")
        return data

    def check_encoding(self, response: Any) -> None:
        """Refuse a compressed reply: a small one may unpack to any size, and none was asked for."""
        given = response.headers.get("content-encoding", "identity").strip().lower()
        if given not in ("", "identity"):
            raise TooMuch("sent a compressed reply, which was not asked for")


class _Stream:
    """A connection of the HTTP client, within the bound of the thread that reads it."""

    def __init__(self, inner: Any, bound: Bound, late: type[Exception]):
        self._inner, self._bound, self._late = inner, bound, late

    def _left(self, given: float | None) -> float:
        left = self._bound.seconds(given)
        if left <= 0:
            raise self._late("the reply as a whole took too long")
        return left

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._bound.take(self._inner.read(max_bytes, timeout=self._left(timeout)))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout=self._left(timeout))

    def start_tls(self, ssl_context: Any, server_hostname: Any = None, timeout: float | None = None) -> "_Stream":
        inner = self._inner.start_tls(ssl_context, server_hostname, self._left(timeout))
        return _Stream(inner, self._bound, self._late)

    def close(self) -> None:
        self._inner.close()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend:
    """What opens the HTTP client's connections, within the bound of the thread that asks for one."""

    def __init__(self, inner: Any, bound: Bound):
        self._inner, self._bound = inner, bound
        # httpcore's or, behind newer clients, httpcore2's: the one class that the client tries again after.
        self._late = import_module(type(inner).__module__.partition(".")[0]).ReadTimeout

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, **settings: Any) -> _Stream:
        inner = self._inner.connect_tcp(host, port, timeout=max(self._bound.seconds(timeout), 1e-3), **settings)
        return _Stream(inner, self._bound, self._late)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


def put_bound(client: Any, bound: Bound) -> None:
    """Put all connections of an httpx (or httpx2) client under `bound`, those through the environment's proxies too.

    The names are private to it, and the same in both; a reply that drips fails its test where they change.
    """
    for transport in (client._transport, *client._mounts.values()):
        if transport is not None:  # of an address that no proxy is for
            pool = transport._pool
            pool._network_backend = _Backend(pool._network_backend, bound)
