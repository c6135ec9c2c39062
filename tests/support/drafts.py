"""Shared by several tests."""

import math
from functools import cache
from typing import Any

import torch

import hf_lossy_assist as hla
from hf_lossy_assist import HeadConfig, LinearHead
from support import tiny


@cache
@torch.no_grad()
def head_for(draft: Any, kind: str = "linear") -> hla.Head:
    """A random head whose logits over random texts have mean 0 and spread 2, so that thresholds around 0.5 divide tokens."""
    torch.manual_seed(5)
    size = draft.config.get_text_config(decoder=True).hidden_size
    head = (
        LinearHead(HeadConfig(size)) if kind == "linear" else hla.MLPHead(HeadConfig(size, kind="mlp", width=8))
    ).eval()
    ids = torch.randint(4, draft.config.vocab_size, (8, 24))
    inputs = {"decoder_input_ids": ids} if draft.config.is_encoder_decoder else {}
    out = draft(input_ids=ids, **inputs, output_hidden_states=True)
    logits = head.logit((out.decoder_hidden_states if inputs else out.hidden_states)[-1])
    head.linear.weight *= 2 / logits.std()
    head.linear.bias.copy_((head.linear.bias - logits.mean()) * 2 / logits.std())
    return head


@cache
def draft_of(name: str, kind: str = "often") -> Any:
    return tiny.draft_of(tiny.shared(name), kind)


def sure(value: float) -> LinearHead:
    """A head that always computes `value`."""
    head = LinearHead(HeadConfig(32)).eval()
    with torch.no_grad():
        head.linear.weight.zero_()
        head.linear.bias.fill_(math.log(value / (1 - value)))
    return head
