"""Heads that say what a test wants, heads with something in every entry, and ways to damage their files."""

import dataclasses
import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch

import hf_lossy_assist as hla
from hf_lossy_assist import FeatureSpec, HeadConfig, LinearHead, ModelIdentity
from hf_lossy_assist.artifacts.identity import tokenizer_hash
from support import tiny
from support.small import tokenizer


ROWS = [{"threshold": 0.3, "eta_tp": 0.91, "eta_fp": 0.42}, {"threshold": 0.5, "eta_tp": 0.8, "eta_fp": 0.25}]
FIGURES = {"auroc": 0.8125, "brier": 0.125, "acceptable_share": 0.75, "thresholds": ROWS}


@cache
def target() -> Any:
    return tiny.build("llama")


@cache
def draft() -> Any:
    return tiny.noisy(tiny.build("llama"), 0.05)


def full_config(**changes: Any) -> HeadConfig:
    """A config with something in every entry."""
    full = {
        "hidden_size": 32, "label": "q(x) ≤ 1.2·p(x)", "features": FeatureSpec(layer=1, norm=False),
        "target": dataclasses.replace(ModelIdentity.of(target()), id="org/target", revision="a" * 40),
        "draft": dataclasses.replace(ModelIdentity.of(draft()), id="org/draft"), "tokenizer_hash": tokenizer_hash(tokenizer()),
        "decoding": {"do_sample": True, "temperature": 0.7}, "training": {"prompts": "some prompts", "number_of_prompts": 40, "seed": 3},
        "metrics": FIGURES, "versions": {"torch": "2.9", "hf_lossy_assist": "0.1.0"}, "model_weights": {"draft": "float64:" + "b" * 64},
    }  # fmt: skip
    return HeadConfig(**full | changes)


def linear(config: HeadConfig | None = None, seed: int = 0) -> LinearHead:
    torch.manual_seed(seed)
    return LinearHead(HeadConfig(32) if config is None else config).eval()


def edit(folder: Path, file: str = "config.json", /, **changes: Any) -> None:
    """Change entries of a saved JSON file; None takes one out."""
    spec = json.loads((folder / file).read_text(encoding="utf-8")) | changes
    spec = {name: value for name, value in spec.items() if value is not None}
    (folder / file).write_text(json.dumps(spec), encoding="utf-8")


def rewrite(
    folder: Path, data: bytes, and_digest: bool = False, facts: str = "config.json", tensors: str = "model.safetensors"
) -> None:
    """Write other tensors, and if told so the checksum that belongs to them."""
    (folder / tensors).write_bytes(data)
    if and_digest:
        checksum = "tables_sha256" if facts == "profile.json" else "weights_sha256"
        edit(folder, facts, **{checksum: hashlib.sha256(data).hexdigest()})


def save(folder: Path) -> Path:
    """The folder of a saved head with something in every entry."""
    linear(full_config()).save_pretrained(folder)
    return folder


def make_head(size: int = 32, weight: Any = 0.0, bias: float = 0.0, **changes: Any) -> LinearHead:
    """A judge: logit of P(important) = weight · features + bias."""
    config = {"polarity": "important", "method": "autojudge", "features": FeatureSpec("target", "token")} | changes
    head = LinearHead(HeadConfig(size, **config)).eval()
    with torch.no_grad():
        head.linear.weight.copy_(torch.as_tensor(weight).expand(1, size))
        head.linear.bias.fill_(bias)
    return head


@torch.no_grad()
def balanced(head: Any, states: torch.Tensor) -> Any:
    """The head with logits over `states` of mean 0 and spread 2, so that thresholds around 0.5 divide tokens."""
    logits = head.logit(states)
    head.linear.weight *= 2 / logits.std()
    head.linear.bias.copy_((head.linear.bias - logits.mean()) * 2 / logits.std())
    return head.eval()


@cache
@torch.no_grad()
def head_for(draft: Any, kind: str = "linear") -> hla.Head:
    """A random head that divides the tokens of random texts."""
    torch.manual_seed(5)
    size = draft.config.get_text_config(decoder=True).hidden_size
    head = LinearHead(HeadConfig(size)) if kind == "linear" else hla.MLPHead(HeadConfig(size, kind="mlp", width=8))
    ids = torch.randint(4, draft.config.vocab_size, (8, 24))
    inputs = {"decoder_input_ids": ids} if draft.config.is_encoder_decoder else {}
    out = draft(input_ids=ids, **inputs, output_hidden_states=True)
    return balanced(head.eval(), (out.decoder_hidden_states if inputs else out.hidden_states)[-1])


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
