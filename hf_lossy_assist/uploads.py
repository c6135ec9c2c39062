"""Lists of numbers that the host knows, as tensors on a device: each goes there once, and several go together.

An upload makes the host wait until the device has done all that it was asked to do. So a round begins with one upload of the lists that it
will need (`upload`), the device itself works out what follows from them (`advance`), and `on_device` finds either by its numbers.
On the CPU a tensor is simply made.
"""

import threading
from collections.abc import Hashable, Sequence

import torch


MOST = 256  # lists that are remembered, the latest ones; a list has a number for each row


class _PerThread(threading.local):
    """The tensors that a thread's calls have on devices. Nobody writes into them."""

    def __init__(self) -> None:
        self.tensors: dict[Hashable, torch.Tensor] = {}


_known = _PerThread()


def on_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return `values` as a tensor (n,) on `device`, which is not to be changed."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    upload([values], device, dtype)
    return _known.tensors[_key(values, device, dtype)]


def upload(lists: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.int64) -> None:
    """Bring those of `lists` to `device` that are not there yet, all at once, for `on_device` to find."""
    if device.type == "cpu":
        return
    tensors, keys = _known.tensors, {_key(values, device, dtype): values for values in lists}
    new = {key: values for key, values in keys.items() if key not in tensors}
    if new:
        numbers = torch.tensor([x for values in new.values() for x in values], dtype=dtype, device=device)
        tensors |= zip(new, numbers.split([len(values) for values in new.values()]), strict=True)
    for key in keys:
        tensors[key] = tensors.pop(key)  # the latest is the last
    while len(tensors) > MOST:
        del tensors[next(iter(tensors))]


def advance(values: Sequence[int], amounts: Sequence[int], device: torch.device) -> list[int]:
    """Return `values[b] + amounts[b]` of each row, which the device is to know without an upload."""
    out = [value + amount for value, amount in zip(values, amounts, strict=True)]
    if device.type != "cpu" and len(set(out)) > 1:
        more = amounts[0] if len(set(amounts)) == 1 else on_device(amounts, device)
        _known.tensors[_key(out, device, torch.int64)] = on_device(values, device) + more
    return out


def _key(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> Hashable:
    # A tensor is of one stream, and of one mode of autograd.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, dtype, stream, torch.is_inference_mode_enabled(), tuple(values)
