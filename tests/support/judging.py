"""Shared by several tests."""

from typing import Any

import torch

from hf_lossy_assist import FeatureSpec, HeadConfig, LinearHead


def head_of(size: int = 32, weight: Any = 0.0, bias: float = 0.0, **changes: Any) -> LinearHead:
    """A judge: logit of P(important) = weight · features + bias."""
    config = {"polarity": "important", "method": "autojudge", "features": FeatureSpec("target", "token")} | changes
    head = LinearHead(HeadConfig(size, **config)).eval()
    with torch.no_grad():
        head.linear.weight.copy_(torch.as_tensor(weight).expand(1, size))
        head.linear.bias.fill_(bias)
    return head
