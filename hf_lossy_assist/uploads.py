"""Upload lists of integers from the host to a device as tensors, each list once, and several lists together.

An upload makes the host wait for the device to finish its queued work. So a round begins with a single upload of the lists that it will need
(`upload`), the device derives other values from them (`advance`), and `on_device` finds both by their values. On the CPU tensors are created
directly.
"""

import threading
from collections.abc import Hashable, Sequence

import torch


MOST = 256  # cached lists, the latest ones; a list has a value for each row


class _PerThread(threading.local):
    """Tensors on devices for the calls of one thread. They must not be modified."""

    def __init__(self) -> None:
        self.tensors: dict[Hashable, torch.Tensor] = {}


_known = _PerThread()


def on_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return `values` as a tensor (n,) on `device`, which must not be modified."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    upload([values], device, dtype)
    return _known.tensors[_key(values, device, dtype)]


def upload(lists: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.int64) -> None:
    """Copy those of `lists` that are not on `device` yet, in one transfer, for `on_device` to find."""
    if device.type == "cpu":
        return
    tensors, keys = _known.tensors, {_key(values, device, dtype): values for values in lists}
    new = {key: values for key, values in keys.items() if key not in tensors}
    if new:
        numbers = torch.tensor([x for values in new.values() for x in values], dtype=dtype, device=device)
        tensors |= zip(new, numbers.split([len(values) for values in new.values()]), strict=True)
    for key in keys:
        tensors[key] = tensors.pop(key)  # moves it to the end, as the latest
    while len(tensors) > MOST:
        del tensors[next(iter(tensors))]


def advance(values: Sequence[int], amounts: Sequence[int], device: torch.device) -> list[int]:
    """Return `values[b] + amounts[b]` for each row, and compute it on the device too, without an upload."""
    out = [value + amount for value, amount in zip(values, amounts, strict=True)]
    if device.type != "cpu" and len(set(out)) > 1:
        more = amounts[0] if len(set(amounts)) == 1 else on_device(amounts, device)
        _known.tensors[_key(out, device, torch.int64)] = on_device(values, device) + more
    return out


def _key(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> Hashable:
    # Tensors belong to a stream and to an autograd mode.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, dtype, stream, torch.is_inference_mode_enabled(), tuple(values)
