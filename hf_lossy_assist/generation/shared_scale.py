"""Quantised models in which the tokens of one forward share a scale: what a token gets then depends on the tokens behind it.

PyTorch's dynamic quantisation scales a layer's whole input at once; other schemes do so for each token by itself, or not at all. Which
one a model has is tried, for there are too many kinds to name.
"""

import warnings
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..models.int8 import ScaledByToken
from ..models.introspection import base_of
from ..policy.policy import LossyPolicy


TRIALS, WIDTH = 4, 12  # forwards, and tokens in each; the first half of them is the same everywhere
# What was tried, and of which quantised parts the model was then made: it may be quantised in place after a call.
_found: WeakKeyDictionary[Any, tuple[frozenset[str], bool | None]] = WeakKeyDictionary()
_warned: WeakSet[Any] = WeakSet()


def shares_scale(model: Any) -> bool | None:
    """Whether other tokens behind it change a token's logits in this causal model; False for one that is not quantised.

    None for a quantised model that does not run on tokens alone, so that it could not be tried.
    """
    parts = _quantised_parts(model)
    if not parts:
        return False
    if model not in _found or _found[model][0] != parts:
        _found[model] = parts, _tokens_behind_matter(model)
    return _found[model][1]


def _quantised_parts(model: Any) -> frozenset[str]:
    """The classes of a model's modules and parameters that look quantised, by name; none: it is not. Cheap: every call asks."""
    # (A layer of torch's own says of itself that it cannot be.)
    kinds = {type(part) for part in (*model.modules(), *model.parameters())} - {NonDynamicallyQuantizableLinear}
    names = {f"{kind.__module__}.{kind.__name__}" for kind in kinds}
    marks = {"is_quantized"} if getattr(model, "is_quantized", False) else set()
    return frozenset(marks | {name for name in names if "quant" in name.lower() or "torchao" in name})


@torch.no_grad()
def _tokens_behind_matter(model: Any) -> bool | None:
    table, config = model.get_input_embeddings().weight, model.config
    size = min(config.get_text_config(decoder=True).vocab_size, 1000)
    ids = torch.arange(TRIALS * WIDTH, device=table.device).view(TRIALS, 1, WIDTH) * 31 % size
    ids[:, :, : WIDTH // 2] = ids[:1, :, : WIDTH // 2]
    names = ("input_ids", "decoder_input_ids") if config.is_encoder_decoder else ("input_ids",)
    fixed = dict.fromkeys(names[:-1], ids[0])  # an encoder's tokens may all look at each other
    try:
        first = [model(**fixed, **{names[-1]: one}).logits[0, : WIDTH // 2].float() for one in ids]
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return None  # it needs more than tokens
    return any(float((one - first[0]).abs().max()) > 1e-4 * float(first[0].abs().max()) for one in first[1:])


def warn_of_shared_scales(policy: LossyPolicy, target: Any, sampling: bool) -> None:
    """Say once for each model where a policy is called lossless and such a model makes it less than that."""
    if not policy.lossless:
        return
    target = base_of(target)
    # A companion's distributions decide what is drafted or verified; greedily, the target's choice stands whatever they are.
    models = {"target": target, "companion": policy.filter.companion_for(target) if sampling else None}
    for name, model in models.items():
        model = None if model is None else base_of(model)
        if model is None or model in _warned:
            continue
        found = shares_scale(model)
        if found is None:
            _warned.add(model)
            warnings.warn(
                f"the {name} is quantised and needs more than tokens, so nobody tried whether tokens behind change its logits: "
                "if its activations are quantised dynamically, this policy is lossless only up to that",
                UserWarning,
                stacklevel=6,
            )
        elif name == "target" and any(isinstance(part, ScaledByToken) for part in model.modules()):
            _warned.add(model)
            warnings.warn(
                "the target computes in int8, which makes more of what attention computes a little differently in a block, so that its text can "
                "differ from what generate writes: keep it in float where the text has to be the same",
                UserWarning,
                stacklevel=6,
            )
        elif found:
            _warned.add(model)
            what = (
                "what a block writes can differ from what generate writes"
                if name == "target"
                else "sampling is exact only up to that"
            )
            warnings.warn(
                f"the {name}'s activations are quantised by a scale that all tokens of a forward share (dynamic quantisation), so its distributions "
                f"depend on the tokens behind and {what}: quantise its weights alone",
                UserWarning,
                stacklevel=6,
            )
