"""Tensors in few passes and few uploads: parts of a batch that fit a cache, and lists from the host.

A vocabulary has 150 000 tokens and more: a sort or a copy of that size dominates the cost of a rule.

An upload makes the host wait for the device to finish its queued work. So a round begins with a single upload of the
lists that it will need (`upload`), the device derives other values from them (`advance`), and `on_device` finds both by
their values. On the CPU tensors are created directly.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager

import torch

from .validation import shown


GROUP = 128  # tokens that are represented by their maximum
PART = 1 << 20  # elements that a thread processes at once: 4 MB in float32
MOST_LISTS = 256  # cached lists, the latest ones; a list has a value for each row


def fork_random(device: torch.device) -> AbstractContextManager[None]:
    """Restore torch's generators of the CPU and of a CUDA `device` after the context."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def refuse_unfit(answer: object, shape: Sequence[int], dtype: torch.dtype, source: object, name: str) -> torch.Tensor:
    """Return `answer` of the method `name` of a user's class. Raises: `TypeError` for a wrong shape or dtype."""
    if isinstance(answer, torch.Tensor):
        if answer.shape == torch.Size(shape) and answer.dtype == dtype:
            return answer
        result = f"{str(answer.dtype).removeprefix('torch.')} of shape {tuple(answer.shape)}"
    else:
        result = shown(answer)
    expected = f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
    raise TypeError(f"{type(source).__name__}: {name}: expected {expected}, got {result}")


def looks_are_free(x: torch.Tensor) -> bool:
    """Return whether the host may read values of `x` at no cost: on the CPU, outside a graph.
    Shapes may then depend on values."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def rows_at_once(size: int) -> int:
    """Return how many rows of `size` elements stay in the cache, over all threads."""
    return torch.get_num_threads() * max(1, PART // size)


def in_parts(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Compute the row-wise `function` of tensors (B, …);
    on the CPU some rows at a time, so that intermediate results stay in the cache."""
    batch, size = len(tensors[0]), sum(x.numel() for x in tensors)
    if not looks_are_free(tensors[0]) or size <= torch.get_num_threads() * PART:
        return function(*tensors)
    chunks = zip(*(x.split(rows_at_once(size // batch)) for x in tensors), strict=True)
    return torch.cat([function(*chunk) for chunk in chunks])


def argmax(values: torch.Tensor) -> torch.Tensor:
    """Return `argmax`, the first among equals, (..., V) → (...) int64;
    on the CPU in an eighth of the time, through maxima of groups."""
    groups = values.shape[-1] // GROUP
    if not looks_are_free(values) or groups < 2:
        return values.argmax(dim=-1)
    body, rest = values[..., : groups * GROUP].unflatten(-1, (groups, GROUP)), values[..., groups * GROUP :]
    maxima = body.amax(dim=-1)
    group = maxima.argmax(dim=-1, keepdim=True)
    inside = body.gather(-2, group[..., None].expand(*group.shape, GROUP)).squeeze(-2).argmax(dim=-1, keepdim=True)
    best = group * GROUP + inside
    if rest.shape[-1]:
        last = rest.argmax(dim=-1, keepdim=True)
        pair = torch.cat([values.gather(-1, best), rest.gather(-1, last)], dim=-1)
        best = torch.cat([best, last + groups * GROUP], dim=-1).gather(-1, pair.argmax(dim=-1, keepdim=True))
    return best.squeeze(-1)


def at_places(values: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return `values[b, places[b]]` of each row, (B, n, V) and (B,) → (B, V)."""
    batch, count = values.shape[:2]
    return values.flatten(0, 1).index_select(0, torch.arange(batch, device=slots.device) * count + slots)


def passing(compare: Callable[..., torch.Tensor], values: torch.Tensor, bar: torch.Tensor) -> torch.Tensor:
    """Return 1.0 where `compare(values, bar)`, such as `torch.gt`, holds, else 0.0, (..., V) float32: sums are exact up
    to 2²⁴ tokens.

    Not in bool, which takes several times as long to write and to sum.
    """
    shape = torch.broadcast_shapes(values.shape, bar.shape)
    return compare(values, bar, out=torch.empty(shape, dtype=torch.float32, device=values.device))


def keep_one_token(scores: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """Give all probability to token 0 in rows of `scores` (B, V) without an allowed token, if `raw` (B, V) is finite:
    any guess will do."""
    nothing = (scores.amax(dim=-1) == float("-inf")) & raw.amax(dim=-1).isfinite()
    if looks_are_free(nothing) and not bool(nothing.any()):
        return scores
    return torch.cat([scores[:, :1].masked_fill(nothing[:, None], 0.0), scores[:, 1:]], dim=1)


class _PerThread(threading.local):
    """Tensors on devices for the calls of one thread. They must not be modified."""

    def __init__(self) -> None:
        self.tensors: dict[Hashable, torch.Tensor] = {}


_uploaded = _PerThread()


def on_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return `values` as a tensor (n,) on `device`, which must not be modified."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    upload([values], device, dtype)
    return _uploaded.tensors[_key(values, device, dtype)]


def upload(lists: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.int64) -> None:
    """Copy those of `lists` that are not on `device` yet, in one transfer, for `on_device` to find."""
    if device.type == "cpu":
        return
    tensors, keys = _uploaded.tensors, {_key(values, device, dtype): values for values in lists}
    new = {key: values for key, values in keys.items() if key not in tensors}
    if new:
        uploaded = torch.tensor([x for values in new.values() for x in values], dtype=dtype, device=device)
        tensors |= zip(new, uploaded.split([len(values) for values in new.values()]), strict=True)
    for key in keys:
        tensors[key] = tensors.pop(key)  # moves it to the end, as the latest
    while len(tensors) > MOST_LISTS:
        del tensors[next(iter(tensors))]


def advance(values: Sequence[int], amounts: Sequence[int], device: torch.device) -> list[int]:
    """Return `values[b] + amounts[b]` for each row, and compute it on the device too, without an upload."""
    out = [value + amount for value, amount in zip(values, amounts, strict=True)]
    if device.type != "cpu" and len(set(out)) > 1:
        more = amounts[0] if len(set(amounts)) == 1 else on_device(amounts, device)
        _uploaded.tensors[_key(out, device, torch.int64)] = on_device(values, device) + more
    return out


def _key(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> Hashable:
    # Tensors belong to a stream and to an autograd mode.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, dtype, stream, torch.is_inference_mode_enabled(), tuple(values)
