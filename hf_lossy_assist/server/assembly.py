"""Make a server of loaded models: its policies by the names that requests use, its limits, and its worker."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.types import Message, Scope

from ..generation.runner import Runner
from ..policy.parse import as_policy
from ..policy.policy import LossyPolicy
from ..validation import shown
from .fields import RequestLimits, find_longest
from .http import Bounds, count_connections
from .routes import Server
from .worker import Worker


if TYPE_CHECKING:
    from ..drafters.base import Drafter

KEY = "HF_LOSSY_API_KEY"  # an environment variable


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the operator.

    Args:
        name: what clients call the model. api_key: what they must present; None: nothing.
        batch_size: texts that are written at a time. max_waiting: requests that may wait beside them.
        max_new_tokens: of a text. max_length: tokens of a prompt and its text; None: the models' own limit.
        grace: seconds for unfinished requests at shutdown.
    """

    name: str = "demo"
    api_key: str | None = None
    batch_size: int = 16
    max_waiting: int = 256
    max_new_tokens: int = 512
    max_length: int | None = None
    grace: float = 30

    def make_server(
        self, models: tuple[Any, Any, Any], drafter: "Drafter | None", policies: Mapping[str, LossyPolicy]
    ) -> Server:
        """Return a server. `models`: target, draft and tokenizer. Raises: `ValueError` or `TypeError`, one line, for what cannot run together."""
        target, draft, tokenizer = models
        for policy in policies.values():
            Runner(policy, draft, tokenizer=tokenizer, drafter=drafter).validate(target)
        limits = RequestLimits(policies, self.max_new_tokens, find_longest(target, draft, self.max_length))
        worker = Worker(models, policies, self.batch_size, self.max_waiting, drafter)
        worker.check_settings()
        bounds = Bounds(count_connections(self.batch_size + self.max_waiting), grace=self.grace)
        return Server(worker, self.name, limits, self.api_key, bounds)


def check_key(key: str | None) -> None:
    """Raise `ValueError`, one line, for an API key that no client could present."""
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError(
            f"the API key, or {KEY}: expected ASCII characters, no blanks at its ends, and not nothing: no client could present it"
        )


def read_policies(texts: Iterable[str]) -> dict[str, LossyPolicy]:
    """Return policies by the names that requests use: a file or folder by its name, a short form unchanged."""
    chosen: dict[str, LossyPolicy] = {}
    for text in texts:
        name = Path(text).name if os.path.exists(text) else text  # False for JSON that is too long for a path
        if name in chosen:
            raise ValueError(f"policies: two of them are called {shown(name)}: name each once, or rename a file")
        chosen[name] = as_policy(text)
    return chosen


async def answer_request(app: Starlette, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
    """Yield the messages of ASGI with which an application answers a request whose body is known. Closing the iterator ends the request."""
    messages, bodies = asyncio.Queue[Message | None](), [body]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    call = asyncio.ensure_future(app(scope, receive, messages.put))
    call.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            yield message
    finally:
        call.cancel()
