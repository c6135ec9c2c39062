"""A warning where a certified policy is used for something else than it was certified for."""

import warnings
from typing import Any

from ..artifacts.conditions import read_sampling, read_shaping
from ..policy.policy import LossyPolicy, compute_fingerprint
from ..validation import listed


_said: set[tuple[str, ...]] = set()


def warn_of_doubts(policy: LossyPolicy, models: dict[str, Any], config: Any, new_tokens: int) -> None:
    """Say once what differs from the policy, the models and the decoding of the certificate. `new_tokens`: most of this call."""
    if policy.certificate is None:
        return
    decoding = read_sampling(config) | read_shaping(config, bool(config.do_sample)) | {"max_new_tokens": new_tokens}
    found = policy.certificate.doubts(models, decoding, compute_fingerprint(policy))
    if found and tuple(found) not in _said:
        _said.add(tuple(found))
        warnings.warn(
            f"this policy's certificate is of something else: {listed(found)}: it says nothing of this call",
            stacklevel=2,
        )
