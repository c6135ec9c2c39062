"""Models in int8 on the CPU: 8-bit weights, 14-bit activations, and exact integer sums."""

import copy
import math
import warnings
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..terminal import Bar
from ..validation import one_line, shown
from .prepack import PackedLinear, Weights, is_plain, replace_layers
from .weight_versions import named_int8


Module = TypeVar("Module", bound=torch.nn.Module)
MARK = ":int8"  # suffix of the name of a model in int8
METHOD = "hf_lossy_assist_int8"  # in the config.json of a model saved in int8


def int8(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model`, of any precision, in int8; see `quantised`."""
    return quantised(copy.deepcopy(model))


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    """Convert the linear layers of `model`, which is on the CPU, to int8, and the rest to float32; return the model.

    Its name gets the suffix ":int8", so records distinguish it from the model in float.
    Raises: `ValueError`, one line, for a model that is already quantised or packed or is on another device, and for a PyTorch without the kernels
    for this machine.
    """
    name = model.config.name_or_path or type(model).__name__
    if any(type(part) is PackedLinear for part in model.modules()):
        raise ValueError(
            f"{one_line(name)} has lost its weights to prepack(…): put the model into int8 in place of packing it"
        )
    if named_int8(name) or getattr(model, "is_quantized", False):
        raise ValueError(
            f"{one_line(name)} is quantised already, and cannot be put into int8 again: use it as it is, or name another"
        )
    if (device := next(model.parameters()).device).type != "cpu":
        raise ValueError(
            f"{one_line(name)} is on {device}, and int8 is for the CPU: move it there, or pass another checkpoint"
        )
    linears_in_int8(model)
    model.config.name_or_path = name + MARK
    model.config.dtype = torch.float32
    model.config.quantization_config = Int8Config()  # else a saved model would load as one in float without weights
    return model


def linears_in_int8(module: Module, *, quiet: bool = True) -> Module:
    """Convert the linear layers of `module` to int8, and the rest to float32; return the module. quiet: no progress bar. Raises: see `quantised`."""
    replaced = [part for part in module.modules() if is_plain(part) or isinstance(part, Int8Weights)]
    with warnings.catch_warnings():
        # PyTorch plans to remove these functions; other kernels take longer for one token (docs/log.md).
        warnings.filterwarnings("ignore", message="torch.quantize_per", category=UserWarning)
        try:
            Int8Linear.of(torch.nn.Linear(8, 8))(torch.zeros(1, 8))  # fails before anything is changed
        except (AttributeError, RuntimeError) as error:
            raise ValueError(
                f"this PyTorch ({torch.__version__}) has no int8 for this machine: {one_line(error, 200)}: leave int8 out"
            ) from None
        with Bar(len(replaced), "int8", "layers", quiet=quiet) as bar:
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
        made, weight = cls(linear), linear.weight.float()
        made.scale.copy_(weight.abs().amax(dim=1).clamp_min_(1e-30) / 127)
        made.int8.copy_((weight / made.scale[:, None]).round_())
        return made

    @property
    def weight(self) -> torch.Tensor:
        """Return the weights in float32, for models that set or read a layer's weights directly."""
        return self.int8.detach().float() * self.scale[:, None]


class Int8Linear(PackedLinear):
    """A linear layer with int8 weights and a scale per output; activations have a scale per token and two 7-bit halves.

    A token's result is the same to the bit whatever else the batch contains, since integer sums do not depend on the order. 8-bit activations would
    keep that, but not the texts: attention rounds a little differently in a block than for one token, and coarse steps amplify the last bits.
    PyTorch's kernel for int8 weights with bfloat16 activations takes several times as long (docs/log.md).
    """

    LEVELS = 63.5  # of the upper half on either side of zero: with 8 bits, sums of two products overflow on CPUs without VNNI
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
        """Return the weights in float32, for models that also read a layer's weights directly."""
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
    """`AutoModelForCausalLM.from_pretrained(…, quantization_config=Int8Config())`: linear layers in int8 on the CPU, the rest in float32."""

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
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else {str(device_map)}
        if not places <= {"None", "cpu"}:
            raise ValueError(f"int8 is for the CPU, and device_map is {one_line(device_map, 100)}: leave it out")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.pre_quantized else dtype

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> None:
        if self.pre_quantized:
            replace_layers(model, [part for part in model.modules() if is_plain(part)], Int8Weights)
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
