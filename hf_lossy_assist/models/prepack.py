"""Linear layers whose weights are packed once for the CPU; PyTorch would otherwise repack them in every call.

The layouts are opaque to torch.compile, so a custom operator computes each product and finds its weights by number.
"""

import itertools
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard, TypeVar
from weakref import finalize

import torch
from transformers import PreTrainedModel

from ..terminal import Bar
from ..validation import one_line
from .introspection import base_of


DTYPES = (torch.float32, torch.bfloat16)
Product = Callable[[torch.Tensor], torch.Tensor]
Layer = TypeVar("Layer", bound=torch.nn.Module)

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


def prepack(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the weights of a model's linear layers by weights packed for this CPU; return the model.

    PyTorch's float32 product copies all weights again for a block of tokens; a packed one does not. The results are the same.

    Embeddings are not changed, nor are layers with a hook or another forward. A packed model runs eagerly and compiled; it cannot be trained, saved
    or moved.

    Raises: `TypeError` or `ValueError`, one line, for anything but a model in float32 or bfloat16 on the CPU, and for a PyTorch without the
    kernels.
    """
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"prepack: expected a loaded Transformers model, got {type(model).__name__}")
    if base.device.type != "cpu":
        raise ValueError(f"prepack is for the CPU, and this model is on {base.device}: use it as it is there")
    if base.dtype not in DTYPES:
        raise ValueError(
            f"prepack: expected a model in float32 or bfloat16, got {str(base.dtype).removeprefix('torch.')}"
        )
    replaced = [part for part in base.modules() if is_plain(part) and part.weight.dtype in DTYPES]
    for dtype in {part.weight.dtype for part in replaced}:
        _try(dtype)  # fails before anything is changed
    replace_layers(base, replaced, PackedLinear)
    base.requires_grad_(False)  # packed layers have no backward
    return model


def is_plain(part: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Return whether this is a plain `Linear`: a hook or another forward would be lost in the replacement."""
    more = part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__
    return type(part) is torch.nn.Linear and not more


def replace_layers(
    module: torch.nn.Module, replaced: list[Layer], make: Callable[[Layer], torch.nn.Module], bar: Bar | None = None
) -> None:
    """Replace each layer by `make(layer)` wherever it is used. Empties the list on the way, which frees memory early."""
    places: dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]] = {part: [] for part in replaced}
    for parent in module.modules():  # `named_children` yields a shared one only once
        for child, part in parent._modules.items():
            if part in places:
                places[part].append((parent, child))
    while replaced:
        made = make(part := replaced.pop())
        for parent, child in places.pop(part):
            setattr(parent, child, made)
        if bar is not None:
            bar.to(bar.done + 1)


def _try(dtype: torch.dtype) -> None:
    """Pack a tiny layer. Raises: `ValueError`, one line, if that fails, as bfloat16 does on a CPU without AVX-512."""
    try:
        PackedLinear(torch.nn.Linear(16, 16, dtype=dtype))
    except (RuntimeError, AttributeError) as error:
        name, other = str(dtype).removeprefix("torch."), " or load the model in float32" * (dtype == torch.bfloat16)
        raise ValueError(
            f"prepack: this PyTorch ({torch.__version__}) cannot pack {name} weights for this machine ({one_line(error, 200)}): leave it out{other}"
        ) from None


class Weights:
    """Packed weights and the number under which the operator finds them; freed with the last layer that uses them."""

    def __init__(self, product: Product, packed: object = None):
        """packed: what the product reads, from which the weights can be unpacked."""
        self.number, self.product, self.packed = next(_numbers), product, packed
        _products[self.number] = product
        finalize(self, _products.pop, self.number, None)

    def __deepcopy__(self, memo: object) -> "Weights":
        return self  # shared: they are read-only

    def __reduce__(self) -> NoReturn:
        raise TypeError("a packed model cannot be pickled: save the model before prepack(…)")


class PackedLinear(torch.nn.Module):
    """x · Wᵀ + b as in `torch.nn.Linear`, with packed weights: (…, `in_features`) → (…, `out_features`), in the dtype of x."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        self.weights = Weights(
            self.product(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        )
        self.number = self.weights.number  # a constant in graphs, so a `Signature` must see it

    @staticmethod
    def product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """Return the product with weights in oneDNN's layout."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return self.weights.product(x)  # the operator adds as much time as the product of a small layer
        return torch.ops.hf_lossy_assist.packed_linear(x, self.number, self.out_features)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedLinear":
        probe = fn(torch.empty(0, dtype=self.dtype))
        if (probe.device.type, probe.dtype) != ("cpu", self.dtype):
            name = str(self.dtype).removeprefix("torch.")
            raise ValueError(f"a packed model stays on the CPU in {name}: move or convert the model before prepack(…)")
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        raise ValueError("a packed model has no weights to save: save the model before prepack(…)")

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        raise ValueError("a packed model takes no other weights: load them before prepack(…)")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
