"""Models in int8: a draft's copy as a companion that any draft has, and a model as it was loaded."""

import copy
import warnings

import torch
from transformers import PreTrainedModel

from ..validation import one_line


MARK = ":int8"  # behind the name of a model in int8


def int8(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` in int8, of whatever precision it is; see `quantised`."""
    if model.device.type != "cpu":
        raise ValueError(
            f"an int8 companion is for the CPU, and this model is on {model.device}: pass another checkpoint"
        )
    return quantised(copy.deepcopy(model).float())


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, float32 and on the CPU, whose linear layers compute in int8 from now on: PyTorch's dynamic quantisation.

    Its name gets ":int8" behind it, so that what is trained with it tells it from the model in float.
    Raises: `ValueError`, one line, for a model that is quantised already, and for a PyTorch that cannot do it on this machine.
    """
    name = model.config.name_or_path or type(model).__name__
    if name.endswith(MARK) or getattr(model, "is_quantized", False):
        raise ValueError(
            f"{one_line(name)} is quantised already, and cannot be put into int8 again: use it as it is, or name another"
        )
    with warnings.catch_warnings():
        # To be removed some day, PyTorch says. Its successor, torchao, takes several times as long without a compiler (docs/log.md).
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="torch.quantize_per", category=UserWarning)
        try:
            from torch.ao.quantization import quantize_dynamic

            out = quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
        except (ImportError, RuntimeError) as error:
            raise ValueError(
                f"this PyTorch ({torch.__version__}) has no dynamic int8 for this machine: {error}"
            ) from None
    out.config.name_or_path = name + MARK
    return out
