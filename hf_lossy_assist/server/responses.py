"""What clients are sent: the objects of OpenAI's API with what speculation did, and the counts that Prometheus reads."""

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..generation.finished_texts import Result


SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # buckets of the histograms
ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass
class CompletionResponse:
    """The objects of one answer. `chat`: of /v1/chat/completions."""

    model: str
    chat: bool
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def whole(self, text: str, end: str, usage: Mapping[str, object]) -> dict[str, object]:
        """Return the answer in one piece. `end`: "stop" or "length"."""
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._object("chat.completion" if self.chat else "text_completion", content, end) | {"usage": usage}

    def piece(self, text: str, end: str | None = None, first: bool = False) -> str:
        """Return a piece of a streamed answer. `first`: it names the role."""
        delta = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        return format_event(self._object(self._chunk, {"delta": delta} if self.chat else {"text": text}, end))

    def last(self, usage: Mapping[str, object]) -> str:
        """Return the piece with the usage, after a streamed answer."""
        return format_event(self._object(self._chunk, {}, None) | {"choices": [], "usage": usage})

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _object(self, kind: str, content: Mapping[str, object], end: str | None) -> dict[str, object]:
        choices = [{"index": 0, **content, "logprobs": None, "finish_reason": end}]
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def format_event(value: object) -> str:
    """Return a server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n\n"


def make_error(message: str, status: int) -> dict[str, object]:
    """Return what OpenAI's clients read of a request that got no text."""
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def make_usage(result: Result, prompt: int, policy: str) -> dict[str, object]:
    """Return token counts as OpenAI has them, and what speculation did to the text."""
    summary, new = result.speculation.summary(), len(result.token_ids)
    speculation = {"lossy_policy": policy, "lossless": result.speculation.lossless}
    speculation |= {name: round(summary[name], 4) for name in ("draft_acceptance_rate", "mean_acceptance_length")}
    speculation |= {name: summary[name] for name in ("num_draft_tokens", "num_accepted_draft_tokens")}
    for share, count in (("lossy_share", "num_lossy_accepts"), ("unchecked_share", "num_unchecked_tokens")):
        speculation[share] = round(summary[count] / new, 4) if new else 0.0
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return counts | {"speculation": speculation}


class Metrics:
    """Counters of one server. `load`: returns how many texts are being written, and how many requests wait."""

    def __init__(self, load: Callable[[], tuple[int, int]]):
        self.registry = CollectorRegistry()
        registry: dict[str, Any] = {"registry": self.registry}
        times = registry | {"buckets": SECONDS}
        self.requests = Counter("hf_lossy_requests", "Requests by how they ended", ["end"], **registry)
        self.tokens = Counter("hf_lossy_tokens", "Tokens by what they were", ["kind"], **registry)
        self.seconds = Histogram("hf_lossy_request_seconds", "From a request to its last token", **times)
        self.first = Histogram("hf_lossy_first_token_seconds", "From a streamed request to its first text", **times)
        writing = Gauge("hf_lossy_writing", "Requests whose text is being written", **registry)
        writing.set_function(lambda: load()[0])
        waiting = Gauge("hf_lossy_waiting", "Requests whose text waits", **registry)
        waiting.set_function(lambda: load()[1])
        for kind in ("prompt", "new", "drafted", "accepted", "lossy", "unchecked"):
            self.tokens.labels(kind)
        for end in ("stop", "length", "cancelled", "refused", "failed"):
            self.requests.labels(end)

    def count(self, result: Result, prompt: int, end: str, seconds: float) -> None:
        """Count a text that was written."""
        row = result.speculation.rows[0]
        counts = {
            "prompt": prompt,
            "new": len(result.token_ids),
            "drafted": row.num_draft_tokens,
            "accepted": row.num_accepted_draft_tokens,
            "lossy": row.num_lossy_accepts,
            "unchecked": row.num_unchecked_tokens,
        }
        for kind, number in counts.items():
            self.tokens.labels(kind).inc(number)
        self.requests.labels(end).inc()
        self.seconds.observe(seconds)

    def page(self) -> tuple[bytes, str]:
        """Return all counts, and their content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
