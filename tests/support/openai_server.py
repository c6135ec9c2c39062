"""A small OpenAI-compatible server on loopback: /v1/models, /v1/completions and /v1/chat/completions, each served by a
function that the test gives, so that the real `openai` client talks to a real model or to a scripted one. It can be
told to fail."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


Complete = Callable[[str, int, dict], tuple[str, str]]  # prompt, max_tokens, body -> text, finish_reason
Chat = Callable[[list, int, dict], tuple[str, str]]  # messages, max_tokens, body -> text, finish_reason


@dataclass(frozen=True)
class Received:
    """A request as it came in."""

    path: str
    at: float  # time.monotonic()
    body: dict
    key: str


class Dropped(Response):
    """Promises a body and closes the connection."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        head = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": head})


class OpenAIServer:
    """`with OpenAIServer(complete=…, chat=…) as server`: `server.url` (with the /v1) answers until the block ends.

    `key`: what a client must present, None: anything goes. `listed`: whether there is a /models. `requests` is what came
    in.
    """

    def __init__(
        self,
        complete: Complete | None = None,
        chat: Chat | None = None,
        *,
        model: str = "target",
        key: str | None = None,
        listed: bool = True,
    ):
        self.complete, self.chat, self.model, self.key, self.listed = complete, chat, model, key, listed
        self.requests: list[Received] = []
        self._faults: list[str] = []
        self._lock = threading.Lock()

    def fail(self, fault: str, times: int = 1) -> None:
        """The next `times` requests get "500", "429" (try again at once), "html", "no_choices", "no_text", "close" or
        "hang"."""
        assert fault in ("500", "429", "html", "no_choices", "no_text", "close", "hang"), fault
        with self._lock:
            self._faults += [fault] * times

    def __enter__(self) -> "OpenAIServer":
        table = [("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")]
        app = Starlette(routes=[Route(path, self._answer, methods=[how]) for how, path in table])
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        # A dropped connection is an error to the server, which is why it is to be silent.
        config = uvicorn.Config(app, interface="asgi3", log_level="critical", lifespan="off", ws="none", http="h11")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    async def _answer(self, request: Request) -> Response:
        came, body = time.monotonic(), json.loads(await request.body() or b"{}")
        path, key = request.url.path, request.headers.get("authorization", "").removeprefix("Bearer ")
        with self._lock:
            self.requests.append(Received(path, came, body, key))
            fault = self._faults.pop(0) if self._faults else None
        if fault is not None:
            return await self._faulty(fault)
        if self.key is not None and key != self.key:
            return refused(401, "Incorrect API key provided")
        if path.endswith("/models"):
            rows = {"object": "list", "data": [{"id": self.model, "object": "model"}]}
            return JSONResponse(rows) if self.listed else refused(404, "Not Found")
        if body["model"] != self.model:
            return refused(404, f"The model `{body['model']}` does not exist.")
        try:
            return JSONResponse(await run_in_threadpool(self._reply, path, body))
        except Exception as error:  # what a model of the test's own raises is the server's failure
            return refused(500, repr(error))

    def _reply(self, path: str, body: dict) -> dict[str, Any]:
        if path.endswith("/chat/completions"):
            assert self.chat is not None, "this server has no chat"
            text, reason = self.chat(body["messages"], body["max_tokens"], body)
            what: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        else:
            assert self.complete is not None, "this server has no completions"
            text, reason = self.complete(body["prompt"], body["max_tokens"], body)
            what = {"text": text}
        usage = {"completion_tokens": len(text.split())}  # words: enough to see that they are counted
        return {
            "id": "1",
            "model": self.model,
            "choices": [what | {"index": 0, "finish_reason": reason}],
            "usage": usage,
        }

    async def _faulty(self, fault: str) -> Response:
        if fault == "hang":
            while not self._server.should_exit:
                await asyncio.sleep(0.05)
        return {
            "500": refused(500, "out of\nmemory"),
            "429": refused(429, "slow down", {"Retry-After": "0"}),
            "html": Response("<html>\n<body>Welcome</body></html>", media_type="text/html"),
            "no_choices": JSONResponse({"id": "1"}),
            "no_text": JSONResponse(
                {"choices": [{"text": None, "message": {"content": ["a"]}, "finish_reason": "stop"}]}
            ),
            "close": Dropped(),
            "hang": Dropped(),
        }[fault]


def refused(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error in the API's form."""
    return JSONResponse({"error": {"message": message, "type": "error", "code": None}}, status, headers)


def demo_completions(target: Any, tokenizer: Any) -> Complete:
    """The greedy continuations of a demo model, one at a time; the end token is not part of the text, nor is a stop
    text."""
    lock = threading.Lock()

    def complete(prompt: str, max_tokens: int, body: dict) -> tuple[str, str]:
        given = tokenizer(prompt, return_tensors="pt").to(target.device)  # input_ids (1, M)
        with lock, torch.inference_mode():
            out = target.generate(**given, max_new_tokens=max_tokens, do_sample=False)
        new = out[0, given["input_ids"].shape[1] :].tolist()
        ended = tokenizer.eos_token_id in new
        text = tokenizer.decode(new[: new.index(tokenizer.eos_token_id)] if ended else new)
        places = [text.find(stop) for stop in body.get("stop") or () if stop in text]
        return (text[: min(places)], "stop") if places else (text, "stop" if ended else "length")

    return complete
