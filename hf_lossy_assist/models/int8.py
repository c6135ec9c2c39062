"""Models in int8: a draft's copy as a companion that any draft has, and a model as it was loaded."""

import copy
import warnings

import torch
from transformers import PreTrainedModel


def int8(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` in int8; see `quantised`."""
    if model.device.type != "cpu":
        raise ValueError(
            f"an int8 companion is for the CPU, and this model is on {model.device}: pass another checkpoint"
        )
    return quantised(copy.deepcopy(model))


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, float32 and on the CPU, whose linear layers compute in int8 from now on: PyTorch's dynamic quantisation.

    Its name gets ":int8" behind it, so that what is trained with it tells it from the model in float.
    Raises: `ValueError`, one line, for a PyTorch that cannot do it on this machine.
    """
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
    out.config.name_or_path = f"{model.config.name_or_path}:int8"
    return out
