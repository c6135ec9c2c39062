"""A server of this package in a thread, on a free port of loopback, and clients that stall."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai

import hf_lossy_assist as hla
from hf_lossy_assist.server.bodies import RequestLimits
from hf_lossy_assist.server.http import BoundedUvicorn, Bounds
from hf_lossy_assist.server.routes import Server
from hf_lossy_assist.server.worker import Worker


class Running:
    """`url`, `port`, `engine`, `uvicorn`, and the `openai` client for it."""

    def __init__(self, port: int, uvicorn: BoundedUvicorn, server: Server):
        self.port, self.url = port, f"http://127.0.0.1:{port}/v1"
        self.uvicorn, self.server, self.worker = uvicorn, server, server.worker
        self.clients: list[openai.OpenAI] = []

    def client(self, key: str = "none", **more: Any) -> openai.OpenAI:
        self.clients.append(openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60, **more))
        return self.clients[-1]

    def free(self, seconds: float = 20.0) -> bool:
        """Whether nothing is written and nobody waits, soon."""
        deadline = time.monotonic() + seconds
        while self.worker.load != (0, 0) or self.worker._jobs:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


@contextmanager
def serving(
    models: Any, names: tuple[str, ...] = ("svip",), rows: int = 8, waiting: int = 64, most: int = 64,
    key: str | None = None, longest: int = 256, drafter: hla.Drafter | None = None, **bounds: Any,
) -> Iterator[Running]:  # fmt: skip
    """The server of three models (target, draft, tokenizer), to the end of the block. `bounds`: what is not as `Bounds` has it."""
    policies = {name: hla.as_policy(name) for name in names}
    limits = RequestLimits(policies, most, longest)
    server = Server(Worker(models, policies, rows, waiting, drafter), "demo", limits, key, Bounds(**bounds))
    uvicorn_server = BoundedUvicorn(server.app(), server.bounds, server.worker.give_up)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: uvicorn_server.run(sockets=[listening]), daemon=True)
    thread.start()
    try:
        while not uvicorn_server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        running = Running(listening.getsockname()[1], uvicorn_server, server)
        yield running
        for client in running.clients:
            client.close()
    finally:
        uvicorn_server.should_exit = True
        thread.join(60)
        listening.close()
        assert not thread.is_alive() and not server.worker.is_alive()


STREAMS = 30  # of one connection


def connect(port: int, unread: bool = False) -> socket.socket:
    """Connect to a server on loopback. `unread`: with as little room for replies as the system allows."""
    connection = socket.socket()
    if unread:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the server's buffer grows with it
    connection.settimeout(20)
    connection.connect(("127.0.0.1", port))
    return connection


def head(path: str, length: int, key: str | None = None) -> bytes:
    """Write the head of a POST request."""
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{authorization}Content-Length: {length}\r\n\r\n".encode()


def post(path: str, body: dict, key: str | None = None) -> bytes:
    data = json.dumps(body).encode()
    return head(path, len(data), key) + data


def half_head(port: int, key: str | None = None) -> socket.socket:
    connection = connect(port)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: ")
    return connection


def half_body(port: int, key: str | None = None, length: int = 4 * 2**20) -> socket.socket:
    """All but the last byte of a body."""
    connection = connect(port)
    connection.sendall(head("/v1/completions", length, key))
    try:
        connection.sendall(b'{"prompt": "' + b"x" * (length - 13))
    except OSError:  # it was refused
        pass
    return connection


def unread_replies(port: int, key: str | None = None) -> socket.socket:
    connection = connect(port, unread=True)
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    return connection


def unread_stream(port: int, key: str | None = None) -> socket.socket:
    """Streams of which one is stuck: what comes before them is less than the system takes, and all of them are more."""
    connection = connect(port, unread=True)
    text = {"prompt": "How many", "max_tokens": 200, "temperature": 2.0, "seed": 3, "stream": True}
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 400 + post("/v1/completions", text, key) * STREAMS)
    return connection


STALLS: dict[str, Callable[[int, str | None], socket.socket]] = {
    "half heads": half_head, "half bodies": half_body, "unread replies": unread_replies, "unread streams": unread_stream,
}  # fmt: skip


def rest(connection: socket.socket) -> bytes:
    """Read all that comes until the server closes, which it does 5 seconds after a whole request."""
    out = b""
    try:
        while piece := connection.recv(65536):
            out += piece
    except ConnectionResetError:
        pass
    return out
