"""Objects sent to clients: those of OpenAI's API, extended by statistics of speculation, and counters for Prometheus."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, disable_created_metrics

from ..artifacts.json_io import JSONObject
from ..generation.output import Result
from ..stats.speculation import SpeculationStats
from .bodies import format_event
from .tool_calls import CallReader


COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_lossy_tokens",
    "spec_decode_num_unchecked_tokens",
)
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

    def whole(self, choices: Sequence[JSONObject], usage: JSONObject) -> JSONObject:
        """Return the whole answer. `choices`: from `choice`."""
        return self._object("chat.completion", choices) | usage

    def choice(
        self, index: int, text: str, end: str, logprobs: object, calls: CallReader | None = None
    ) -> dict[str, object]:
        """Return one complete text of an answer. `end`: "stop", "length" or "tool_calls"; `calls`: those parsed from the text."""
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if calls is not None:
            message["content"] = calls.content if not calls.calls else calls.content or None
            message |= {"tool_calls": calls.calls} if calls.calls else {}
        content = {"message": message} if self.chat else {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": end}

    def piece(
        self, index: int, more: JSONObject, logprobs: object = None, end: str | None = None, first: bool = False
    ) -> str:
        """Return a piece of a streamed text. `more`: `content` or `tool_calls`; `first`: include the role."""
        begin = {"role": "assistant", "content": None if "tool_calls" in more else ""} if first else {}
        content = {"delta": begin | more} if self.chat else {"text": more.get("content", "")}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": end}
        return format_event(self._object("chat.completion.chunk", [choice]))

    def last(self, usage: JSONObject) -> str:
        """Return the piece with the usage, which ends a streamed answer."""
        return format_event(self._object("chat.completion.chunk", []) | usage)

    def _object(self, kind: str, choices: Sequence[JSONObject]) -> JSONObject:
        kind = kind if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": [*choices]}


def make_usage(results: Sequence[Result], prompt: int, policy: str) -> JSONObject:
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
    out: JSONObject = {"usage": counts | {"speculation": speculation}}
    if len(results) == 1:  # as in vLLM; AIPerf reads it
        out["metrics"] = {"speculative_decoding": {name: summary[name] for name in OF_VLLM}}
    return out


Kind = TypeVar("Kind", Counter, Gauge, Histogram)
Times = partial(Histogram, buckets=SECONDS)


class Metrics:
    """Counters of one server with vLLM's names, and two more: tokens of lossy accepts, and unchecked ones.

    Args:
        load: returns how many texts are being written, and how many wait. model: its name, a label of all counters.
    """

    def __init__(self, load: Callable[[], tuple[int, int]], model: str):
        disable_created_metrics()
        self.registry, self.model = CollectorRegistry(), model
        self._ends = self._make(Counter, "request_success", "finished_reason")
        self._accepted_at = self._make(Counter, "spec_decode_num_accepted_tokens_per_pos", "position")
        self._counters = {name: self._make(Counter, name).labels(model) for name in COUNTERS}
        self._seconds = self._make(Times, "e2e_request_latency_seconds").labels(model)
        self.first_token = self._make(Times, "time_to_first_token_seconds").labels(model)
        self._make(Gauge, "num_requests_running").labels(model).set_function(lambda: load()[0])
        self._make(Gauge, "num_requests_waiting").labels(model).set_function(lambda: load()[1])
        for end in ("stop", "length", "abort", "refused", "error"):
            self._ends.labels(model, end)

    def _make(self, kind: Callable[..., Kind], name: str, *labels: str) -> Kind:
        """Return a metric with the model's name and further labels."""
        return kind(f"vllm:{name}", f"As vLLM's {name}", ["model_name", *labels], registry=self.registry)

    def count(self, result: Result, prompt: int, end: str, seconds: float) -> None:
        """Count a finished text. prompt: tokens of its prompt."""
        row = result.speculation.rows[0]
        counts = [prompt, len(result.token_ids), row.num_spec_steps, row.num_draft_tokens]
        counts += [row.num_accepted_draft_tokens, row.num_lossy_accepts, row.num_unchecked_tokens]
        for counter, count in zip(self._counters.values(), counts, strict=True):
            counter.inc(count)
        for (_, accepted), count in row.steps.items():
            for position in range(accepted):
                self._accepted_at.labels(self.model, str(position)).inc(count)
        self.count_end(end)
        self._seconds.observe(seconds)

    def count_end(self, reason: str) -> None:
        """Count a text that has ended, by the reason: abort, refused and error beside `finish_reason`."""
        self._ends.labels(self.model, reason).inc()

    def collect_labelled(self, label: Mapping[str, str]) -> list[Metric]:
        """Return all counters with a further label."""
        families = list(self.registry.collect())
        for family in families:
            family.samples = [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]
        return families
