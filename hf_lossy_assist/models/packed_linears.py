"""Linear layers whose weights are packed once for the CPU, in float or in int8: 8-bit weights, 14-bit activations,
exact integer sums.

PyTorch would otherwise repack float weights in every call. The layouts are opaque to torch.compile, so a custom
operator computes each product and finds its weights by number.
"""

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard, TypeVar
from weakref import finalize

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..terminal import Bar
from ..validation import one_line, shown
from .introspection import base_of, named_int8


Module = TypeVar("Module", bound=torch.nn.Module)
DTYPES = (torch.float32, torch.bfloat16)
Product = Callable[[torch.Tensor], torch.Tensor]
Layer = TypeVar("Layer", bound=torch.nn.Module)

_products: dict[int, Product] = {}
_numbers = itertools.count()
_library = torch.library.Library("hf_lossy_assist", "DEF")
_library.define("packed_linear(Tensor x, int product, int features) -> Tensor")
_library.impl("packed_linear", lambda x, product, features: _products[product](x), "CPU")
torch.library.register_fake(
    "hf_lossy_assist::packed_linear", lambda x, product, features: x.new_empty((*x.shape[:-1], features)), lib=_library
)


def prepack(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the weights of a model's linear layers by weights packed for this CPU; return the model.

    PyTorch's float32 product copies all weights again for a block of tokens; a packed one does not. The results are the
    same.

    Embeddings are not changed, nor are layers with a hook or another forward. A packed model runs eagerly and compiled;
    it cannot be trained, saved or moved. Layers in another precision than float32 and bfloat16 are left as they are.
    """
    base = base_of(model)
    replace_layers(
        base, [module for module in base.modules() if is_plain(module) and module.weight.dtype in DTYPES], PackedLinear
    )
    base.requires_grad_(False)  # packed layers have no backward
    return model


def is_plain(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Return whether this is a plain `Linear`: a hook or another forward would be lost in the replacement."""
    more = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return type(module) is torch.nn.Linear and not more


def replace_layers(
    module: torch.nn.Module, replaced: list[Layer], make: Callable[[Layer], torch.nn.Module], bar: Bar | None = None
) -> None:
    """Replace each layer by `make(layer)` wherever it is used.
    Empties the list on the way, which frees memory early."""
    owners: dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]] = {layer: [] for layer in replaced}
    for parent in module.modules():  # `named_children` yields a shared one only once
        for child, layer in parent._modules.items():
            if layer in owners:
                owners[layer].append((parent, child))
    while replaced:
        replacement = make(layer := replaced.pop())
        for parent, child in owners.pop(layer):
            setattr(parent, child, replacement)
        if bar is not None:
            bar.to(bar.done + 1)


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
    """x · Wᵀ + b as in `torch.nn.Linear`, with packed weights: (…, `in_features`) → (…, `out_features`), in the dtype
    of x."""

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


MARK = ":int8"  # suffix of the name of a model in int8
METHOD = "hf_lossy_assist_int8"  # in the config.json of a model saved in int8


def int8(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model`, of any precision, in int8; see `quantised`."""
    return quantised(copy.deepcopy(model))


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    """Convert the linear layers of `model`, which is on the CPU, to int8, and the rest to float32; return the model.

    Its name gets the suffix ":int8", so records distinguish it from the model in float.
    Raises: `ValueError`, one line, for a model that is already quantised or packed.
    """
    name = model.config.name_or_path or type(model).__name__
    if any(type(module) is PackedLinear for module in model.modules()):
        raise ValueError(
            f"{one_line(name)} has lost its weights to prepack(…): put the model into int8 in place of packing it"
        )
    if named_int8(name) or getattr(model, "is_quantized", False):
        raise ValueError(
            f"{one_line(name)} is quantised already, and cannot be put into int8 again: use it as it is, or name "
            "another"
        )
    linears_in_int8(model)
    model.config.name_or_path = name + MARK
    model.config.dtype = torch.float32
    model.config.quantization_config = Int8Config()  # else a saved model would load as one in float without weights
    return model


def linears_in_int8(module: Module, *, quiet: bool = True) -> Module:
    """Convert the linear layers of `module` to int8, and the rest to float32; return the module.
    quiet: no progress bar."""
    replaced = [layer for layer in module.modules() if is_plain(layer) or isinstance(layer, Int8Weights)]
    with warnings.catch_warnings(), Bar(len(replaced), "int8", "layers", quiet=quiet) as bar:
        # PyTorch plans to remove these functions; other kernels take longer for one token (docs/log.md).
        warnings.filterwarnings("ignore", message="torch.quantize_per", category=UserWarning)
        replace_layers(module, replaced, Int8Linear.of, bar)
    torch.nn.Module.float(module)  # Transformers' `float` refuses quantised models
    return module.requires_grad_(False)


class Int8Weights(torch.nn.Module):
    """Tensors of an `Int8Linear`; also its placeholder while files are loaded."""

    def __init__(self, linear: torch.nn.Linear):
        """Allocate tensors for the weights of `linear`."""
        super().__init__()
        weight, scale = torch.empty_like(linear.weight, dtype=torch.int8), linear.weight.new_empty(len(linear.weight))
        self.int8 = torch.nn.Parameter(weight, requires_grad=False)
        self.scale = torch.nn.Parameter(scale.float(), requires_grad=False)
        self.bias = linear.bias

    @classmethod
    @torch.no_grad()
    def of(cls, linear: torch.nn.Linear) -> "Int8Weights":
        """Round the weights of `linear`, each row scaled by its largest absolute value."""
        weights, weight = cls(linear), linear.weight.float()
        weights.scale.copy_(weight.abs().amax(dim=1).clamp_min_(1e-30) / 127)
        weights.int8.copy_((weight / weights.scale[:, None]).round_())
        return weights

    @property
    def weight(self) -> torch.Tensor:
        """Return the weights in float32, for models that set or read a layer's weights directly."""
        return self.int8.detach().float() * self.scale[:, None]


class Int8Linear(PackedLinear):
    """A linear layer with int8 weights and a scale per output; activations have a scale per token and two 7-bit halves.

    A token's result is the same to the bit whatever else the batch contains, since integer sums do not depend on the
    order. 8-bit activations would keep that, but not the texts: attention rounds a little differently in a block than
    for one token, and coarse steps amplify the last bits.
    """

    # of the upper half on either side of zero: with 8 bits, sums of two products overflow on CPUs without VNNI
    LEVELS = 63.5
    STEPS = 127  # of the lower half per step of the upper
    bias: torch.Tensor | None

    def __init__(self, made_of: Int8Weights):
        torch.nn.Module.__init__(self)
        weight, scale = made_of.int8.detach(), made_of.scale.detach()
        self.out_features, self.in_features = weight.shape
        self.dtype = torch.float32
        weight = torch._make_per_channel_quantized_tensor(weight, scale, torch.zeros_like(scale, dtype=torch.int64), 0)
        packed = torch.ops.quantized.linear_prepack(weight, None)
        linear = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        self.weights = Weights(lambda x: linear(x, 1.0, 64, packed), packed)
        self.number = self.weights.number
        self.register_buffer("bias", None if made_of.bias is None else made_of.bias.detach().float())

    @property
    def weight(self) -> torch.Tensor:
        """Return the weights in float32, for models that read a layer's weights directly."""
        return torch.ops.quantized.linear_unpack(self.weights.packed)[0].dequantize()

    @classmethod
    def of(cls, layer: torch.nn.Linear | Int8Weights) -> "Int8Linear":
        return cls(layer if isinstance(layer, Int8Weights) else Int8Weights.of(layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, tokens, inputs). Returns (…, tokens, outputs), float32."""
        x = x.float()  # autocast passes another precision
        scale = torch.linalg.vector_norm(x, math.inf, dim=-1, keepdim=True).clamp_min(1e-30) / self.LEVELS
        levels = x / scale
        upper = levels.round()
        upper, lower = super().forward(torch.stack([upper, levels.sub_(upper).mul_(self.STEPS)]))  # rounds the lower
        out = torch.add(upper, lower, alpha=1 / self.STEPS).mul_(scale)
        return out if self.bias is None else out.add_(self.bias)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        weight = torch.ops.quantized.linear_unpack(self.weights.packed)[0]
        destination[f"{prefix}int8"] = weight.int_repr()
        destination[f"{prefix}scale"] = weight.q_per_channel_scales().float()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias


@register_quantization_config(METHOD)
class Int8Config(QuantizationConfigMixin):
    """`AutoModelForCausalLM.from_pretrained(…, quantization_config=Int8Config())`: linear layers in int8 on the CPU,
    the rest in float32."""

    def __init__(self, quant_method: str = METHOD):
        if quant_method != METHOD:
            raise ValueError(f"Int8Config: quant_method is {METHOD!r}, got {shown(quant_method)}: leave it out")
        self.quant_method = quant_method


@register_quantizer(METHOD)
class Int8Quantizer(HfQuantizer):
    """Hooks that Transformers calls while it loads and saves models in int8."""

    is_trainable = False
    is_compileable = True

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: object, device_map: Any = None, **kwargs: object) -> None:
        names = {str(name) for name in device_map.values()} if isinstance(device_map, dict) else {str(device_map)}
        if not names <= {"None", "cpu"}:
            raise ValueError(f"int8 is for the CPU, and device_map is {one_line(device_map, 100)}: leave it out")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.pre_quantized else dtype

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> None:
        if self.pre_quantized:
            replace_layers(model, [module for module in model.modules() if is_plain(module)], Int8Weights)
            # Embeddings in float may have been tied to the head before.
            in_float = lambda name: not isinstance(model.get_submodule(name.rpartition(".")[0]), Int8Weights)  # noqa: E731
            tied = model.all_tied_weights_keys
            model.all_tied_weights_keys = {
                name: tied[name] for name in tied if in_float(name) and in_float(tied[name])
            }

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> None:
        linears_in_int8(model, quiet=False)
        model.config.name_or_path += MARK * (not named_int8(model.config.name_or_path))
        model.config.dtype = torch.float32
