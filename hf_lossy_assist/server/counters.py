"""Statistics of speculation, with vLLM's names: in the usage of each answer, and as counters for Prometheus."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, disable_created_metrics

from ..artifacts.json_io import JSONObject
from ..generation.output import Result
from ..stats.speculation import SpeculationStats


# Counters by the entry of `RowStats` that they add up.
COUNTERS = {
    "spec_decode_num_drafts": "num_spec_steps",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_draft_tokens",
    "spec_decode_num_lossy_tokens": "num_lossy_accepts",
    "spec_decode_num_unchecked_tokens": "num_unchecked_tokens",
}
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # buckets of the histograms
# Entries of `SpeculationStats.summary` in the usage, as in vLLM's --per-request-spec-decode-metrics summary.
SHOWN = (
    "mean_acceptance_length draft_acceptance_rate acceptance_histogram num_spec_steps num_accepted_draft_tokens num_draft_tokens "
    "num_spec_tokens"
).split()

Kind = TypeVar("Kind", Counter, Gauge, Histogram)
Times = partial(Histogram, buckets=SECONDS)


def make_usage(results: Sequence[Result], prompt: int, policy: str) -> JSONObject:
    """Return token counts in OpenAI's format, and statistics of speculation over all texts. prompt: tokens of all prompts, each counted once."""
    stats = SpeculationStats.merge([result.speculation for result in results])
    summary, new = stats.summary(), sum(len(result.token_ids) for result in results)
    speculation = {"lossy_policy": policy, "lossless": stats.lossless, "guarantee": stats.guarantee}
    speculation |= {name: summary[name] for name in SHOWN}
    for share, count in (("lossy_share", "num_lossy_accepts"), ("unchecked_share", "num_unchecked_tokens")):
        speculation[share] = summary[count] / max(new, 1)
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return counts | {"speculation": speculation}


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
        self._prompts = self._make(Counter, "prompt_tokens").labels(model)
        self._new = self._make(Counter, "generation_tokens").labels(model)
        self._speculation = {entry: self._make(Counter, name).labels(model) for name, entry in COUNTERS.items()}
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
        self._prompts.inc(prompt)
        self._new.inc(len(result.token_ids))
        for entry, counter in self._speculation.items():
            counter.inc(getattr(row, entry))
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
