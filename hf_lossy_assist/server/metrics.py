"""What the server counts, in Prometheus' format."""

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..generation.ended import Result


SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server. `load`: texts that are being written, and requests that wait."""

    def __init__(self, load: Callable[[], tuple[int, int]]):
        its = self.registry = CollectorRegistry()
        self.requests = Counter("hf_lossy_requests", "Requests by how they ended", ["end"], registry=its)
        self.tokens = Counter("hf_lossy_tokens", "Tokens by what they were", ["kind"], registry=its)
        self.seconds = Histogram(
            "hf_lossy_request_seconds", "From a request to its last token", buckets=SECONDS, registry=its
        )
        self.first = Histogram(
            "hf_lossy_first_token_seconds", "From a streamed request to its first text", buckets=SECONDS, registry=its
        )
        for place, name in enumerate(("writing", "waiting")):
            gauge = Gauge(f"hf_lossy_{name}", f"Requests whose text is {name}", registry=its)
            gauge.set_function(lambda place=place: load()[place])  # type: ignore[misc]
        for kind in ("prompt", "new", "drafted", "accepted", "lossy", "unchecked"):
            self.tokens.labels(kind)
        for end in ("stop", "length", "cancelled", "refused", "failed"):
            self.requests.labels(end)

    def count(self, result: Result, prompt: int, end: str, seconds: float) -> None:
        """A text that was written."""
        its = result.speculation.rows[0]
        counts = {
            "prompt": prompt, "new": len(result.token_ids), "drafted": its.num_draft_tokens, "accepted": its.num_accepted_draft_tokens,
            "lossy": its.num_lossy_accepts, "unchecked": its.num_unchecked_tokens,
        }  # fmt: skip
        for kind, number in counts.items():
            self.tokens.labels(kind).inc(number)
        self.requests.labels(end).inc()
        self.seconds.observe(seconds)

    def page(self) -> tuple[bytes, str]:
        """All of them, and what they are as a content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
