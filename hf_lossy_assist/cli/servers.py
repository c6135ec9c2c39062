"""The OpenAI-compatible servers that options name."""

import re
from dataclasses import dataclass
from typing import Any

from ..validation import check_number


@dataclass(frozen=True, kw_only=True)
class Servers:
    """OpenAI-compatible servers: one that runs the target, one with a judge of answers."""

    target_url: str | None
    target_model: str | None
    judge_url: str | None
    judge_model: str | None
    per_minute: float | None
    timeout: float

    def __post_init__(self) -> None:
        if (self.target_url is None) != (self.target_model is None):
            raise ValueError("--target-url and --target-model belong together")
        check_number("--timeout", self.timeout, 0.001, 86400.0)
        check_number("--per-minute", 1.0 if self.per_minute is None else self.per_minute, 0.001, 1e9)

    def open(self, role: str) -> Any:
        """The endpoint of "target" or "judge", or a pool of several, once it has answered."""
        from ..tasks.endpoint import Endpoint
        from ..tasks.pool import Pool

        url, model = getattr(self, f"{role}_url"), getattr(self, f"{role}_model")
        if url is None or model is None:
            raise ValueError(
                f"this needs --{role}-url and --{role}-model: an OpenAI-compatible server and a model's name there"
            )
        urls = re.split(r",(?=https?://)", url)  # a password may have commas
        retries = 5 if len(urls) == 1 else 1  # of several, another is asked in place of the same one again and again
        endpoints: list[Endpoint] = []
        try:
            for one in urls:
                endpoints.append(
                    Endpoint(one, model, retries=retries, timeout=self.timeout, per_minute=self.per_minute)
                )
            server = endpoints[0] if len(urls) == 1 else Pool(endpoints)
            server.check()
        except BaseException:
            for endpoint in endpoints:
                endpoint.close()
            raise
        return server
