"""A server of this package in a thread, on a free port of loopback."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai

import hf_lossy_assist as hla
from hf_lossy_assist.server.http import BoundedUvicorn, Bounds
from hf_lossy_assist.server.requests import RequestLimits
from hf_lossy_assist.server.routes import Server
from hf_lossy_assist.server.worker import Worker


class Running:
    """`url`, `port`, `engine`, `uvicorn`, and the `openai` client for it."""

    def __init__(self, port: int, uvicorn: BoundedUvicorn):
        self.port, self.url = port, f"http://127.0.0.1:{port}/v1"
        self.uvicorn, self.server, self.worker = uvicorn, uvicorn.texts, uvicorn.texts.worker
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
    key: str | None = None, **bounds: Any,
) -> Iterator[Running]:  # fmt: skip
    """The server of three models (target, draft, tokenizer), to the end of the block. `bounds`: what is not as `Bounds` has it."""
    policies = {name: hla.as_policy(name) for name in names}
    limits = RequestLimits(policies, most, 256)
    server = Server(Worker(models, policies, rows, waiting), "demo", limits, key, Bounds(**bounds))
    its = BoundedUvicorn(server, "127.0.0.1", 0)
    socket = its.config.bind_socket()
    thread = threading.Thread(target=lambda: its.run(sockets=[socket]), daemon=True)
    thread.start()
    try:
        while not its.started:
            assert thread.is_alive()
            time.sleep(0.01)
        running = Running(socket.getsockname()[1], its)
        yield running
        for client in running.clients:
            client.close()
    finally:
        its.should_exit = True
        thread.join(60)
        socket.close()
        assert not thread.is_alive() and not server.worker.is_alive()
