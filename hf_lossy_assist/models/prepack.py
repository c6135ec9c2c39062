"""Linear layers laid out once for the CPU: what a product would otherwise copy at every call, or compute in int8.

The layouts are opaque to torch.compile, so each product is an operator of its own, which finds its weights by a number.
"""

import itertools
from collections.abc import Callable
from typing import Any
from weakref import finalize

import torch
from transformers import PreTrainedModel

from .inspect import base_of
from .int8 import deprecated_quantisation


LEVELS = (
    63  # seven bits, as PyTorch's own: at eight, processors without VNNI overflow 16 bits in the sum of two products
)
LEAST = 1e-12  # of a token's largest activation: a row of zeros is divided by it
Product = Callable[[torch.Tensor], torch.Tensor]

_products: dict[int, Product] = {}
_numbers = itertools.count()
_library = torch.library.Library("hf_lossy_assist", "DEF")
_library.define("packed_linear(Tensor x, int product, int features) -> Tensor")
_library.impl("packed_linear", lambda x, product, features: _products[product](x), "CPU")
torch.library.register_fake(
    "hf_lossy_assist::packed_linear",
    lambda x, product, features: x.new_empty((*x.shape[:-1], features)),
    lib=_library,
)


def prepack(model: PreTrainedModel, dtype: str | None = None) -> PreTrainedModel:
    """The same model, its linear layers packed for this CPU in place of their weights, which are given up; returns the model.

    The plain float32 product copies all weights once more for a block of tokens; a packed one does not. In "int8" weights have a scale
    for each output and activations one for each token by itself; PyTorch's `quantize_dynamic` has one for all tokens of a forward.
    A layer then gives each token the same whatever stands beside it, but a model does not: attention rounds otherwise in a block, and
    the next layer's seven bits make more of that. Texts of a block can therefore differ from those of `generate`.
    Embeddings stay as they are. A packed model runs eagerly and compiled; it cannot be trained, saved or moved.

    Args:
        dtype: "float32" or "bfloat16" (must be the model's), or "int8"; None: the model's.

    Raises: `TypeError` or `ValueError`, one line, for what is no model on the CPU, another dtype, and a PyTorch that lacks the kernels.
    """
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"prepack: expected a loaded Transformers model, got {type(model).__name__}")
    name = str(base.dtype).removeprefix("torch.")
    dtype = name if dtype is None else dtype
    if base.device.type != "cpu":
        raise ValueError(f"prepack is for the CPU, and this model is on {base.device}: use it as it is there")
    if dtype not in LAYOUTS or dtype not in (name, "int8"):
        raise ValueError(
            f'prepack: expected dtype "int8" or the model\'s own, float32 or bfloat16, got {dtype!r} for {name}'
        )
    for module in list(base.modules()):
        for child, part in module.named_children():
            if type(part) is torch.nn.Linear:
                setattr(module, child, _packed(part, dtype))
    return model


def _packed(linear: torch.nn.Linear, dtype: str) -> "PackedLinear":
    try:
        return LAYOUTS[dtype](linear)
    except (RuntimeError, AttributeError) as error:
        raise ValueError(f"this PyTorch ({torch.__version__}) cannot pack {dtype} for this machine: {error}") from None


class Weights:
    """Packed weights: the number that the operator finds them by, forgotten with the last layer that has them."""

    def __init__(self, product: Product):
        self.number = next(_numbers)
        _products[self.number] = product
        finalize(self, _products.pop, self.number, None)

    def __deepcopy__(self, memo: Any) -> "Weights":
        return self  # nobody writes to them

    def __reduce__(self) -> Any:
        raise TypeError("a packed model cannot be pickled: save the model before prepack(…)")


class PackedLinear(torch.nn.Module):
    """x · Wᵀ + b as `torch.nn.Linear`, by packed weights: (…, `in_features`) → (…, `out_features`), of the dtype of x."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weights = Weights(
            self.product(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        )

    @staticmethod
    def product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """oneDNN's layout, made once."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.hf_lossy_assist.packed_linear(x, self.weights.number, self.out_features)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a packed model has no weights to save: save the model before prepack(…)")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Int8Linear(PackedLinear):
    """The product in int8; sums are of whole numbers, so in this layer a token's result does not depend on the tokens beside it."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__(linear)
        self.bias = None if linear.bias is None else torch.nn.Parameter(linear.bias.detach(), requires_grad=False)

    @staticmethod
    def product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """FBGEMM's layout; the bias is added to what has been scaled back."""
        scales = weight.abs().amax(dim=1).clamp(min=LEAST).double() / 127  # (out,)
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        with deprecated_quantisation():
            rounded = torch.quantize_per_channel(weight.float(), scales, zeros, axis=0, dtype=torch.qint8)
        packed = torch.ops.quantized.linear_prepack(rounded, None)
        run = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        return lambda x: run(x, 1.0, LEVELS + 1, packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.float()
        scales = rows.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST) / LEVELS  # (…, 1)
        out = super().forward(rows / scales) * scales
        return (out if self.bias is None else out + self.bias).to(x.dtype)


LAYOUTS: dict[str, type[PackedLinear]] = {"float32": PackedLinear, "bfloat16": PackedLinear, "int8": Int8Linear}
