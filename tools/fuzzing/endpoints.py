"""Servers with wrong answers: JSON and shapes outside the API, endless bodies and headers, broken connections."""

import gzip
import json
import socket
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from hf_lossy_assist.tasks.endpoint import Endpoint

from .values import ESCAPE, Random, damaged_text, mutated, shown, written
from .verdicts import Case, Wrong


MODELS = {"object": "list", "data": [{"id": "target", "object": "model"}, {"id": "other"}]}
TEXT = {
    "id": "1",
    "choices": [{"text": " w1 w2", "index": 0, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 2},
}
CHAT = {
    "id": "1",
    "choices": [{"message": {"role": "assistant", "content": "w1"}, "finish_reason": "length"}],
    "usage": {"completion_tokens": 1},
}
RIGHT = {"models": MODELS, "complete": TEXT, "chat": CHAT}
TIMEOUT = 0.4
Piece = tuple[bytes, float]  # what is sent, and the seconds to wait before it


class Server:
    """A server that sends `pieces` to every client."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.endless: bytes = b""  # sent repeatedly after them
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/v1"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self.listening.accept()
            threading.Thread(
                target=self._answer, args=(connection, list(self.pieces), self.endless), daemon=True
            ).start()

    def _answer(self, connection: socket.socket, pieces: list[Piece], endless: bytes) -> None:
        with connection:
            try:
                connection.settimeout(10)
                connection.recv(65536)
                for data, wait in pieces:
                    time.sleep(wait)
                    connection.sendall(data)
                while endless:
                    connection.sendall(endless)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(65536)
            except OSError:  # the client went away, as it should from some of these
                return


@cache
def server() -> Server:
    return Server()


def reply(
    body: bytes, status: str = "200 OK", headers: str = "Content-Type: application/json\r\n", length: int | None = None
) -> bytes:
    head = f"HTTP/1.1 {status}\r\n{headers}Connection: close\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode("latin-1", "replace") + body


def case(random: Random, folder: Path) -> Case:
    kind = random.choice(list(RIGHT))
    how = random.choices(
        ["json", "text", "status", "length", "drip", "endless", "chunks", "packed", "garbage", "early", "settings"],
        [10, 4, 4, 2, 1, 1, 2, 2, 2, 2, 4],
    )[0]  # fmt: skip
    spec: Any = RIGHT[kind] if how not in ("json", "chunks", "packed") else mutated(random, RIGHT[kind])
    body, pieces, endless = written(spec).encode(), [], b""
    settings: dict[str, Any] = {}
    if how == "text":
        body = damaged_text(random, json.dumps(spec))
    if how == "status":
        status = random.choice(
            [
                "500 Oh no",
                "404 Not Found",
                "429 Slow",
                "401 No",
                "301 Moved",
                "204 None",
                "100 Go",
                "999 X",
                "abc",
                "400 x\x1b[31m",
            ]
        )
        where = random.choice(
            [
                "Retry-After: 0\r\n",
                "Retry-After: nan\r\n",
                "Location: /v1/x\r\n",
                "Location: http://127.0.0.1:9/\r\n",
                "",
            ]
        )
        wrong = {"error": {"message": random.choice(["out of\nmemory", ESCAPE, "x" * 10_000, None, 3])}}
        body = random.choice([b"", b"<html>\n</html>", json.dumps(wrong).encode(), b"\xff\x00"])
        pieces = [(reply(body, status, where), 0.0)]
    elif how == "length":
        pieces = [(reply(body, length=random.choice([0, 5, len(body) + 100, 2**62, -1])), 0.0)]
    elif how == "drip":
        whole = reply(body) if random.random() < 0.5 else b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 200
        pieces = [(bytes([byte]), 0.05) for byte in whole]
    elif how == "endless":
        start, endless = random.choice(_ENDLESS)
        pieces = [(start, 0.0)]
    elif how == "chunks":
        sizes = random.choice(
            [b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), b"zz\r\n" + body, b"-5\r\nx\r\n", b"fffffffff\r\n" + body]
        )
        pieces = [(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + sizes, 0.0)]
    elif how == "packed":
        packed = random.choice([gzip.compress(body), gzip.compress(bytes(300 * 2**20), 1), b"\x1f\x8b\x08none", body])
        pieces = [(reply(packed, headers="Content-Encoding: gzip\r\nContent-Type: application/json\r\n"), 0.0)]
    elif how == "garbage":
        pieces = [
            (
                random.choice(
                    [
                        b"\x00" * 50,
                        b"SSH-2.0-x\r\n",
                        b"HTTP/9.9 200\r\n\r\n",
                        b"\r\n\r\n",
                        b"HTTP/1.1 200 OK\r\n: x\r\n\r\n",
                    ]
                ),
                0.0,
            )
        ]
    elif how == "early":
        whole = reply(body)
        pieces = [(whole[: random.randrange(len(whole))], 0.0)]
    elif how == "settings":
        settings = {random.choice(["timeout", "retries", "key", "url", "model"]): random.choice(_SETTINGS)}
    pieces = pieces or [(reply(body), 0.0)]
    what = (
        f"{kind} from a server, {how}: {shown(settings) if settings else b''.join(data for data, _ in pieces)[:250]!r}"
    )
    return Case(what, lambda: _ask(kind, pieces, endless, body, settings))


_SETTINGS: list[Any] = [0, -1, 1, 2.5, float("nan"), float("inf"), 10**30, 10**400, "x", "", None, True, [], "http://", "ftp://x", "http://[::1",
                        "http://127.0.0.1:99999/v1", "http://user:secret@127.0.0.1:9/v1", "a\nb", ESCAPE, b"x", {}]  # fmt: skip
_OPEN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_ENDLESS = [
    (_OPEN + b'\r\n{"id": "', b"a" * 65536), (_OPEN + b"X-Long: ", b"a" * 65536), (_OPEN, b"X-Many: 1\r\n" * 1000),
    (_OPEN + b"Transfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b"a" * 4096 + b"\r\n"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
]  # fmt: skip


def _ask(kind: str, pieces: list[Piece], endless: bytes, body: bytes, settings: dict[str, Any]) -> None:
    served = server()
    served.pieces, served.endless = pieces, endless
    given: dict[str, Any] = {
        "url": served.url,
        "model": "target",
        "timeout": TIMEOUT,
        "retries": 0,
        "key": "k",
    } | settings
    with Endpoint(**given) as endpoint:
        if kind == "models":
            endpoint.check()
            return
        got = (
            endpoint.complete("w0", 4) if kind == "complete" else endpoint.chat([{"role": "user", "content": "w0"}], 4)
        )
    text = getattr(got, "text", got)
    if not isinstance(text, str):
        raise Wrong(f"a text of type {type(text).__name__}")
    try:
        choice = json.loads(body)["choices"][0]
        want = choice["text"] if kind == "complete" else choice["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise Wrong(f"read {text[:80]!r} from a reply that has no text") from None
    if text != want:
        raise Wrong(f"read {text[:80]!r} where the server sent {want!r}"[:300])
