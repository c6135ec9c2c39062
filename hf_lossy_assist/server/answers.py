"""What clients are sent: the objects of OpenAI's API, with what speculation did beside them."""

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from ..generation.ended import Result


@dataclass
class Answer:
    """The shapes of one answer. `chat`: of /v1/chat/completions."""

    model: str
    chat: bool
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def whole(self, text: str, end: str, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece. `end`: "stop" or "length"."""
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": end}
        return self._object("chat.completion" if self.chat else "text_completion", [choice]) | {"usage": usage}

    def piece(self, text: str, end: str | None = None, first: bool = False) -> str:
        """A piece of a streamed answer. `first`: it says who speaks."""
        if self.chat:
            delta = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
            choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}
        else:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": end}
        return event(self._object(self._streamed, [choice]))

    def last(self, usage: dict[str, Any]) -> str:
        """The word about usage behind a streamed answer."""
        return event(self._object(self._streamed, []) | {"usage": usage})

    @property
    def _streamed(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def event(value: Any) -> str:
    """A server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n\n"


def error(message: str, status: int) -> dict[str, Any]:
    """What OpenAI's clients read of a request that got no text."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def usage_of(result: Result, prompt: int, policy: str) -> dict[str, Any]:
    """Token counts as OpenAI has them, and what speculation did to the text."""
    its = result.speculation.summary()
    new, kept = len(result.token_ids), its["num_accepted_draft_tokens"]
    speculation = {
        "lossy_policy": policy,
        "lossless": result.speculation.lossless,
        "draft_acceptance_rate": round(its["draft_acceptance_rate"], 4),
        "mean_acceptance_length": round(its["mean_acceptance_length"], 4),
        "num_draft_tokens": its["num_draft_tokens"],
        "num_accepted_draft_tokens": kept,
        "lossy_share": round(its["num_lossy_accepts"] / new, 4) if new else 0.0,
        "unchecked_share": round(its["num_unchecked_tokens"] / new, 4) if new else 0.0,
    }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "speculation": speculation,
    }
