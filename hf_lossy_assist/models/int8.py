"""Models in int8 on the CPU."""

import copy
import warnings
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ..validation import one_line
from .identity import named_int8


Module = TypeVar("Module", bound=torch.nn.Module)
MARK = ":int8"  # after the name of a model in int8


def int8(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` in int8, of whatever precision it is; see `quantised`."""
    if model.device.type != "cpu":
        raise ValueError(
            f"an int8 companion is for the CPU, and this model is on {model.device}: pass another checkpoint"
        )
    return quantised(copy.deepcopy(model).float())


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    """Have the linear layers of `model`, float32 and on the CPU, compute in int8; return the model.

    PyTorch's dynamic quantisation, with a scale for each row of the weights and one for each token. Its name gets ":int8" after it, so that
    records tell it from the model in float.
    Raises: `ValueError`, one line, for a model that is quantised already, or in another precision or on another device, and for a PyTorch
    that cannot do it on this machine.
    """
    name = model.config.name_or_path or type(model).__name__
    if named_int8(name) or getattr(model, "is_quantized", False):
        raise ValueError(
            f"{one_line(name)} is quantised already, and cannot be put into int8 again: use it as it is, or name another"
        )
    weight = next(model.parameters())
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise ValueError(
            f"{one_line(name)} is {weight.dtype} on {weight.device}, and int8 is made of float32 on the CPU: load it with dtype=torch.float32"
        )
    out = linears_in_int8(model)
    out.config.name_or_path = name + MARK
    return out


def linears_in_int8(module: Module) -> Module:
    """Have the linear layers of `module`, float32 and on the CPU, compute in int8; return the module. Raises: see `quantised`."""
    with warnings.catch_warnings():
        # To be removed some day, PyTorch says. Its successor, torchao, takes several times as long without a compiler (docs/log.md).
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="torch.quantize_per", category=UserWarning)
        try:
            _in_int8(torch.nn.Sequential(torch.nn.Linear(8, 8)))(torch.zeros(1, 8))  # before anything is changed
            return _in_int8(module)
        except (ImportError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"this PyTorch ({torch.__version__}) has no dynamic int8 for this machine: {error}"
            ) from None


def _in_int8(model: Module) -> Module:
    from torch.ao.nn.quantized.dynamic import Linear
    from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

    quantize_dynamic(model, {torch.nn.Linear: per_channel_dynamic_qconfig}, inplace=True)
    for name, layer in list(model.named_modules()):
        if type(layer) is Linear:
            model.set_submodule(name, ScaledByToken(layer))
    return model


class ScaledByToken(torch.nn.Module):
    """A linear layer in int8 that rounds the numbers of each token on another scale.

    PyTorch's own layer rounds all tokens of a call on one scale. The first tokens of many models have numbers a thousand times
    larger than the rest (Sun et al. 2024, Massive Activations), so that the others are rounded to nothing. Here a token's result
    is the same to the bit whatever else is in the call.
    """

    # Whole numbers from 1 to 127: with eight bits, sums of two products overflow on CPUs without VNNI.
    STEP, ZERO = 2 / 126, 64
    bias: torch.Tensor | None

    def __init__(self, layer: Any):
        super().__init__()
        weight, bias = layer._weight_bias()
        layer.set_weight_bias(weight, None)
        self.layer = layer
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, tokens, inputs), float32. Returns (…, tokens, outputs)."""
        scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        out = product(x / scale, self.STEP, self.ZERO, self.layer._packed_params._packed_params)
        return out.mul_(scale) if self.bias is None else torch.addcmul(self.bias, out, scale)
