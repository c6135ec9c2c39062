"""A warning where a certified policy is used for something else than it was certified for."""

import warnings
from typing import Any

from ..policy.policy import LossyPolicy
from ..validation import listed


_said: set[tuple[str, ...]] = set()


def warn_of_doubts(policy: LossyPolicy, models: dict[str, Any], config: Any) -> None:
    """Say once what differs from the models and the decoding of the policy's certificate."""
    if policy.certificate is None:
        return
    here = {role: model for role, model in models.items() if model is not None}
    decoding = {name: getattr(config, name) for name in ("do_sample", "temperature", "top_k", "top_p")}
    found = policy.certificate.doubts(here, {name: value for name, value in decoding.items() if value is not None})
    if found and tuple(found) not in _said:
        _said.add(tuple(found))
        warnings.warn(
            f"this policy's certificate is of something else: {listed(found)}: it says nothing of this call",
            stacklevel=2,
        )
