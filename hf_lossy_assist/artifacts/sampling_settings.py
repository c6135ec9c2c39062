"""On which laws p and q something was measured: sampling settings, as `generate` names them."""

from collections.abc import Mapping
from typing import Any


def decoding_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `settings` that shapes p and q; greedy laws have no other setting than that."""
    names = ("do_sample", "temperature", "top_k", "top_p") if settings.get("do_sample") else ("do_sample",)
    return {name: settings.get(name, False) for name in names}


def decoding_at(config: Any) -> dict[str, Any]:
    """The same of a call's `GenerationConfig`, where None stands for a setting that changes nothing."""
    given = {"do_sample": bool(config.do_sample), "top_k": config.top_k or 0}
    given |= {
        name: 1.0 if getattr(config, name) is None else getattr(config, name) for name in ("temperature", "top_p")
    }
    return decoding_of(given)
