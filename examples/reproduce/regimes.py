"""Make the models of a regime from the demo's: a target that costs more, one out of memory, a draft that guesses worse.

A paper's claim is about models of some ratio of costs and some share of accepted tokens. The demo's models have other ones; these
changes give the claim's without changing what the target writes.
"""

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from medusa import load_medusa
from transformers import PreTrainedModel

import hf_lossy_assist as hla
from hf_lossy_assist.demo import Demo
from hf_lossy_assist.drafters.base import Drafter


Spec = str | dict[str, Any]
PLAIN = ("target", "draft", "companion")
CHANGES = ("width", "noise", "layers", "offloaded")


def make_models(specs: Mapping[str, Spec], demo: Demo, out: Path) -> Demo:
    """Return the demo's models in the places of `specs` ("target", "draft", "companion"), changed as those say. `out`: see `make_model`."""
    target = make_model(specs.get("target", "target"), demo, out)
    rest = {name: make_model(specs.get(name, name), demo._replace(target=target), out) for name in PLAIN[1:]}
    return demo._replace(target=target, **rest)


def make_model(spec: Spec, demo: Demo, out: Path) -> PreTrainedModel | Drafter:
    """Return one of the demo's models, its EAGLE-3 drafter ("eagle3"), Medusa's heads ("medusa", trained once and stored in `out`), or a copy
    of a model with one change, `{"model": name, change: value}`.

    width: neurons of an MLP, the new ones zero: the same logits at the cost of a larger model. noise: added to each matrix, in
    units of its standard deviation. layers: only the first so many (early exit). offloaded: True reads the weights from disk for each forward.
    """
    if spec == "medusa":
        return load_medusa(demo, out / "heads" / "medusa.safetensors")
    if isinstance(spec, str):
        return hla.demo.drafter() if spec == "eagle3" else getattr(demo, spec)
    model, ((change, value),) = (
        getattr(demo, spec["model"]),
        [(name, spec[name]) for name in spec if name != "model"],
    )
    if change == "layers":
        return hla.early_exit(model, value)
    model = copy.deepcopy(model)
    if change == "width":
        widen(model, value)
    elif change == "noise":
        add_noise(model, value)
    else:
        accelerate.disk_offload(model, tempfile.mkdtemp(prefix="hf-lossy-offloaded-"), torch.device("cpu"))
    return model


@torch.no_grad()
def widen(model: PreTrainedModel, width: int) -> None:
    """Pad each MLP of a Llama with neurons of zero weights."""
    for layer in model.model.layers:
        for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            old = getattr(layer.mlp, name).weight
            shape = [width if i == axis else size for i, size in enumerate(old.shape)]
            weight = old.new_zeros(shape)
            weight.narrow(axis, 0, old.shape[axis]).copy_(old)
            getattr(layer.mlp, name).weight = torch.nn.Parameter(weight)
    model.config.intermediate_size = width


@torch.no_grad()
def add_noise(model: PreTrainedModel, noise: float, seed: int = 1) -> None:
    """Move each matrix by `noise` times the spread of its values."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * noise)
    model.config.name_or_path += f"~{noise:g}"
