"""What a user should know of a call that runs: each line is said once."""

import warnings
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import GenerationConfig, PreTrainedModel

from ..artifacts.conditions import read_sampling, read_shaping
from ..models.int8 import ScaledByToken
from ..models.introspection import base_of
from ..policy.policy import LossyPolicy, compute_fingerprint
from ..validation import listed
from .arguments import Settings


# Forwards of a probe, and tokens in each; the first half of them is the same everywhere.
PROBES, WIDTH = 4, 12
_warned: set[Hashable] = set()
# What was found, and of which quantised parts the model was then made: it may be quantised in place after a call.
_found: WeakKeyDictionary[Any, tuple[frozenset[str], bool | None]] = WeakKeyDictionary()


def _warn_once(key: Hashable, line: str, stacklevel: int = 3) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(line, UserWarning, stacklevel=stacklevel)


def announce(policy: LossyPolicy) -> None:
    """Say once for each policy that it is lossy."""
    if not policy.lossless:
        line = f"{policy}: this policy is lossy; the output may differ from the target's own"
        _warn_once(str(policy), line, stacklevel=7)


def warn_of_lookbehind(settings: Settings) -> None:
    """Say that what is tokenized anew for a draft with another tokenizer is no setting here."""
    for name in ("assistant_lookbehind", "target_lookbehind"):
        if settings.is_passed(name):
            _warn_once(name, f"{name} has no effect with lossy_policy, which tokenizes a fixed window anew", 7)


def warn_of_models(target: PreTrainedModel, assistant: PreTrainedModel | None) -> None:
    """Say that a model drafts for itself, and that a model's dropout is on. `assistant`: the draft model or None."""
    models = {"target": target} if assistant is None else {"target": target, "assistant": assistant}
    models = {name: base_of(model) for name, model in models.items()}
    if models["target"] is models.get("assistant"):
        _warn_once(
            ("draft", ref(models["target"])),
            "the target is its own draft, so each drafted token costs what a token of the target costs and nothing is gained: pass a smaller "
            "model, or hf_lossy_assist.early_exit(target, layers)",
        )
    for name, model in models.items():
        if model.training:
            line = f"the {name} is in training mode, where dropout, if it has any, changes its logits from forward to forward: call eval() on it first"
            _warn_once(("training", ref(model)), line)


def warn_of_doubts(policy: LossyPolicy, models: dict[str, Any], config: GenerationConfig, new_tokens: int) -> None:
    """Say what differs from the policy, the models and the decoding of the policy's certificate. `new_tokens`: most of this call."""
    if policy.certificate is None:
        return
    decoding = read_sampling(config) | read_shaping(config, bool(config.do_sample)) | {"max_new_tokens": new_tokens}
    found = policy.certificate.doubts(models, decoding, compute_fingerprint(policy))
    if found:
        line = f"this policy's certificate is of something else: {listed(found)}: it says nothing of this call"
        _warn_once(tuple(found), line)


def warn_of_shared_scales(policy: LossyPolicy, target: PreTrainedModel, sampling: bool) -> None:
    """Say that a quantised model makes a lossless policy less than that.

    PyTorch's dynamic quantisation scales a layer's whole input at once, so that a token's logits depend on the tokens after it; other
    schemes do so for each token by itself, or not at all.
    """
    if not policy.lossless:
        return
    target = base_of(target)
    # A companion's distributions decide what is drafted or verified; greedily, the target's choice stands whatever they are.
    models = {"target": target, "companion": policy.filter.companion_for(target) if sampling else None}
    for name, model in models.items():
        key = None if model is None else ("quantised", ref(base_of(model)))
        if key is None or key in _warned:
            continue
        model, line = base_of(model), None
        shares = shares_scale(model)
        if shares is None:
            line = (
                f"the {name} is quantised and needs more than tokens, so nobody tried whether tokens behind change its logits: "
                "if its activations are quantised dynamically, this policy is lossless only up to that"
            )
        elif name == "target" and any(isinstance(part, ScaledByToken) for part in model.modules()):
            line = (
                "the target computes in int8, which makes more of what attention computes a little differently in a block, so that its text can "
                "differ from what generate writes: keep it in float where the text has to be the same"
            )
        elif shares:
            effect = "what a block writes can differ from what generate writes"
            line = (
                f"the {name}'s activations are quantised by a scale that all tokens of a forward share (dynamic quantisation), so its distributions "
                f"depend on the tokens behind and {effect if name == 'target' else 'sampling is exact only up to that'}: quantise its weights alone"
            )
        if line is not None:
            _warn_once(key, line, stacklevel=7)


def shares_scale(model: PreTrainedModel) -> bool | None:
    """Return whether later tokens change a token's logits in this causal model; False for one that is not quantised.

    None for a quantised model that does not run on tokens alone, so that it could not be probed.
    """
    parts = _find_quantised_parts(model)
    if not parts:
        return False
    if model not in _found or _found[model][0] != parts:
        _found[model] = parts, _probe_later_tokens(model)
    return _found[model][1]


def _find_quantised_parts(model: PreTrainedModel) -> frozenset[str]:
    """Return the classes of a model's modules and parameters that look quantised, by name. Cheap: every call asks."""
    # (A layer of torch's own says of itself that it cannot be.)
    kinds = {type(part) for part in (*model.modules(), *model.parameters())} - {NonDynamicallyQuantizableLinear}
    names = {f"{kind.__module__}.{kind.__name__}" for kind in kinds}
    marks = {"is_quantized"} if getattr(model, "is_quantized", False) else set()
    return frozenset(marks | {name for name in names if "quant" in name.lower() or "torchao" in name})


@torch.no_grad()
def _probe_later_tokens(model: PreTrainedModel) -> bool | None:
    table, config = model.get_input_embeddings().weight, model.config
    size = min(config.get_text_config(decoder=True).vocab_size, 1000)
    ids = torch.arange(PROBES * WIDTH, device=table.device).view(PROBES, 1, WIDTH) * 31 % size
    ids[:, :, : WIDTH // 2] = ids[:1, :, : WIDTH // 2]
    names = ("input_ids", "decoder_input_ids") if config.is_encoder_decoder else ("input_ids",)
    fixed = dict.fromkeys(names[:-1], ids[0])  # an encoder's tokens may all look at each other
    try:
        first = [model(**fixed, **{names[-1]: one}).logits[0, : WIDTH // 2].float() for one in ids]
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return None  # it needs more than tokens
    return any(float((one - first[0]).abs().max()) > 1e-4 * float(first[0].abs().max()) for one in first[1:])
