"""Objects sent to clients: those of OpenAI's API, extended by statistics of speculation, and counters for Prometheus."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
)

from ..generation.output import Result
from ..stats.speculation import SpeculationStats
from .fields import format_event
from .tool_calls import CallReader


SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # buckets of the histograms
# Entries of `SpeculationStats.summary` with vLLM's names (--per-request-spec-decode-metrics summary).
OF_VLLM = (
    "mean_acceptance_length draft_acceptance_rate acceptance_histogram num_spec_steps num_accepted_draft_tokens num_draft_tokens "
    "num_spec_tokens"
).split()


@dataclass
class CompletionResponse:
    """The objects of one answer. `chat`: for /v1/chat/completions."""

    model: str
    chat: bool
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def whole(self, choices: Sequence[Mapping[str, object]], usage: Mapping[str, object]) -> dict[str, object]:
        """Return the whole answer. `choices`: from `choice`."""
        return self._object("chat.completion" if self.chat else "text_completion", choices) | dict(usage)

    def choice(
        self, index: int, text: str, end: str, logprobs: Mapping[str, object] | None, calls: CallReader | None = None
    ) -> dict[str, object]:
        """Return one complete text of an answer. `end`: "stop", "length" or "tool_calls"; `calls`: those parsed from the text."""
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if calls is not None and calls.calls:
            message |= {"content": calls.content or None, "tool_calls": calls.calls}
        elif calls is not None:
            message["content"] = calls.content
        content = {"message": message} if self.chat else {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": end}

    def piece(
        self,
        index: int,
        more: Mapping[str, object],
        logprobs: Mapping[str, object] | None = None,
        end: str | None = None,
        first: bool = False,
    ) -> str:
        """Return a piece of a streamed text. `more`: `content` or `tool_calls`; `first`: include the role."""
        none = None if "tool_calls" in more else ""
        delta = ({"role": "assistant", "content": none} if first else {}) | dict(more)
        content = {"delta": delta} if self.chat else {"text": more.get("content", "")}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": end}
        return format_event(self._object(self._chunk, [choice]))

    def last(self, usage: Mapping[str, object]) -> str:
        """Return the piece with the usage, which ends a streamed answer."""
        return format_event(self._object(self._chunk, []) | dict(usage))

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _object(self, kind: str, choices: Sequence[Mapping[str, object]]) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": [*choices]}


def make_usage(results: Sequence[Result], prompt: int, policy: str) -> dict[str, object]:
    """Return token counts in OpenAI's format, and statistics of speculation over all texts; for a single text also in vLLM's format.

    prompt: tokens of all prompts, each counted once.
    """
    stats = SpeculationStats.merge([result.speculation for result in results])
    summary, new = stats.summary(), sum(len(result.token_ids) for result in results)
    speculation = {"lossy_policy": policy, "lossless": stats.lossless, "guarantee": stats.guarantee}
    speculation |= {name: round(summary[name], 4) for name in ("draft_acceptance_rate", "mean_acceptance_length")}
    speculation |= {name: summary[name] for name in ("num_draft_tokens", "num_accepted_draft_tokens")}
    for share, count in (("lossy_share", "num_lossy_accepts"), ("unchecked_share", "num_unchecked_tokens")):
        speculation[share] = round(summary[count] / new, 4) if new else 0.0
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    out: dict[str, object] = {"usage": counts | {"speculation": speculation}}
    if len(results) == 1:  # as in vLLM; AIPerf reads it
        out["metrics"] = {"speculative_decoding": {name: summary[name] for name in OF_VLLM}}
    return out


class Metrics:
    """Counters of one server.

    Args:
        load: returns how many texts are being written, and how many wait. model: its name, a label of the counters that `vllm bench serve` reads.
    """

    def __init__(self, load: Callable[[], tuple[int, int]], model: str):
        self.registry = CollectorRegistry()
        registry: dict[str, Any] = {"registry": self.registry}
        times = registry | {"buckets": SECONDS}
        self.requests = Counter(
            "hf_lossy_requests", "Texts by how they ended, and refused requests", ["end"], **registry
        )
        self.tokens = Counter("hf_lossy_tokens", "Tokens by what they were", ["kind"], **registry)
        self.seconds = Histogram("hf_lossy_request_seconds", "From a request to its last token", **times)
        self.first = Histogram("hf_lossy_first_token_seconds", "From a streamed request to its first text", **times)
        writing = Gauge("hf_lossy_writing", "Texts that are being written", **registry)
        writing.set_function(lambda: load()[0])
        waiting = Gauge("hf_lossy_waiting", "Texts that wait", **registry)
        waiting.set_function(lambda: load()[1])
        names = "drafts", "draft_tokens", "accepted_tokens"
        labels = {"model_name": model}
        self.of_vllm = [
            Counter(f"vllm:spec_decode_num_{name}", f"As vLLM's: {name}", [*labels], **registry).labels(**labels)
            for name in names
        ]
        places = [*labels, "position"]
        per_place = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "As vLLM's, by place", places, **registry)
        self.accepted_at = partial(per_place.labels, model)
        for kind in ("prompt", "new", "drafted", "accepted", "lossy", "unchecked"):
            self.tokens.labels(kind)
        for end in ("stop", "length", "cancelled", "refused", "failed"):
            self.requests.labels(end)

    def collect_labelled(self, label: Mapping[str, str]) -> list[Metric]:
        """Return all counters with a further label."""
        families = list(self.collect())
        for family in families:
            family.samples = [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]
        return families

    def count(self, result: Result, prompt: int, end: str, seconds: float) -> None:
        """Count a finished text. prompt: tokens of its prompt."""
        row = result.speculation.rows[0]
        counts = row.num_spec_steps, row.num_draft_tokens, row.num_accepted_draft_tokens
        for counter, number in zip(self.of_vllm, counts, strict=True):
            counter.inc(number)
        for (_, accepted), number in row.steps.items():
            for place in range(accepted):
                self.accepted_at(str(place)).inc(number)
        kinds = {
            "prompt": prompt,
            "new": len(result.token_ids),
            "drafted": row.num_draft_tokens,
            "accepted": row.num_accepted_draft_tokens,
            "lossy": row.num_lossy_accepts,
            "unchecked": row.num_unchecked_tokens,
        }
        for kind, number in kinds.items():
            self.tokens.labels(kind).inc(number)
        self.requests.labels(end).inc()
        self.seconds.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield all counts without the times at which they began."""
        for metric in self.registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

    def page(self) -> tuple[bytes, str]:
        """Return all counters, and their content type."""
        return generate_latest(self), CONTENT_TYPE_LATEST
