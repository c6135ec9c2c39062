"""A second device without one: tensors of `pretend:0` and `pretend:1` compute on the CPU and refuse to meet a tensor of another device.

It shows on any machine what a GPU would show of a call's devices: an operation on two of them is an error, as on CUDA; each wait of the host for
the device and each upload from the host is counted, with the line of the package that caused it. It shows no time, no streams and no kernels.

It is a Python backend of torch (`torch.utils.backend_registration`), which not every release has, and which cannot be taken back: it stays
registered, and harmless, in the process. Models need `attn_implementation="eager"`: "sdpa" asks a stub in C++ that such a device lacks.
"""

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_lossy_assist.engine import loop


aten = torch.ops.aten
NAME = "pretend"
# Whose line a wait is counted for: the first of these that is on the stack.
ROOMS = ("hf_lossy_assist/", "transformers/", "tests/")
# Operations whose results the host must see: numbers, and sizes that depend on values.
READS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten._unique2.default, aten.unique_dim.default,
}  # fmt: skip
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


def why_not() -> str | None:
    """Return why this torch cannot pretend a device, or None."""
    needed = {"_setup_privateuseone_for_python_backend": backend_registration}
    needed |= dict.fromkeys(("_only_lift_cpu_tensors", "_set_only_lift_cpu_tensors"), torch._C)
    missing = [name for name, module in needed.items() if not hasattr(module, name)]
    return f"torch {torch.__version__} has no {missing[0]}, which a device in Python needs" if missing else None


@cache
def device(number: int = 0) -> torch.device:
    """Return a pretended device; the first call registers the kind."""
    if reason := why_not():
        pytest.skip(reason)
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        # Checkpoints ask the kind that the process has for it, wherever their tensors are.
        getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return torch.device(NAME, number)


class Round(NamedTuple):
    """The traffic of one round, by line; `going`: the rows that had not ended when it began."""

    waits: Counter[str]
    uploads: Counter[str]
    going: int


class Traffic:
    """The waits and the uploads so far, and apart those of each round that has begun."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.begin(0)  # the set-up of the call is round 0

    def begin(self, going: int) -> None:
        self.rounds.append(Round(Counter(), Counter(), going))

    def count(self, kind: str) -> None:
        getattr(self.rounds[-1], kind)[line()] += 1

    def steady(self) -> list[Round]:
        """Return the rounds from the third on in which no row ended."""
        return [one for one, after in pairwise(self.rounds[3:]) if one.going == after.going == self.rounds[1].going]


def line() -> str:
    """Return the innermost line of the first of `ROOMS` that is on the stack."""
    frames, frame = [], sys._getframe()
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    places = ((room, name, number) for room in ROOMS for name, number in frames if room in name and name != __file__)
    return next((f"{name.rsplit(room, 1)[1]}:{number}" for room, name, number in places), "?")


class MixedDevices(RuntimeError):
    """An operation on tensors of two devices."""


class PretendTensor(torch.Tensor):
    """`inside`: the tensor on the CPU that it stands for."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor, place: torch.device) -> "PretendTensor":
        layout = {"strides": inside.stride(), "storage_offset": inside.storage_offset(), "dtype": inside.dtype}
        out: PretendTensor = torch.Tensor._make_wrapper_subclass(
            cls, inside.size(), device=place, layout=inside.layout, **layout
        )
        out.inside = inside
        return out

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PretendTensor({self.inside}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {}, Traffic())


def run(func: Any, args: Any, kwargs: dict[str, Any], traffic: Traffic) -> Any:
    """Run one operation on the CPU; its results are where its tensors are, or where `device=` says."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    here = [x for x in tensors if isinstance(x, PretendTensor)]
    place = kwargs.get("device")
    place = here[0].device if place is None else torch.device(place)
    pretended = place.type == NAME
    inner_args, inner_kwargs = tree_map_only(PretendTensor, lambda x: x.inside, (args, kwargs))
    if "device" in kwargs:
        inner_kwargs = inner_kwargs | {"device": torch.device("cpu")}

    if func is aten._to_copy.default:
        source, made = args[0], func(*inner_args, **{k: v for k, v in inner_kwargs.items() if k != "pin_memory"})
        if pretended and not here:
            traffic.count("uploads")
        elif here and not pretended and not kwargs.get("non_blocking"):
            traffic.count("waits")
        made = made.clone() if here and made is source.inside or made is source else made
        return PretendTensor(made, place) if pretended else made
    if func is aten.copy_.default:
        to, source = args[:2]
        if isinstance(to, PretendTensor) != isinstance(source, PretendTensor):
            traffic.count("uploads" if isinstance(to, PretendTensor) else "waits")
        inner_args[0].copy_(inner_args[1])
        return to

    if here:
        _check_places(func, args, tensors, here[0].device, traffic)
        masks = func in INDEXING and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        counts = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func in READS or masks or counts:
            traffic.count("waits")
    if func is aten.histc.default and not inner_args[0].is_floating_point():  # which a CPU lacks, and CUDA has
        out = func(inner_args[0].float(), *inner_args[1:], **inner_kwargs).to(inner_args[0].dtype)
    else:
        out = func(*inner_args, **inner_kwargs)
    same = {id(x.inside): x for x in here}  # an operation in place returns the very tensor

    def outside(x: torch.Tensor) -> torch.Tensor:
        return same[id(x)] if id(x) in same else PretendTensor(x, place)

    return tree_map_only(torch.Tensor, outside, out) if pretended else out


def _check_places(func: Any, args: Any, tensors: list[torch.Tensor], place: torch.device, traffic: Traffic) -> None:
    """Raise `MixedDevices` unless all tensors are at `place`, but for what CUDA takes from the host, too: single numbers, and indices."""
    bad = [x for x in tensors if x.device != place and (x.dim() or x.device.type == NAME)]
    if bad and func in INDEXING and args[0].device == place and all(x.device.type == "cpu" for x in bad):
        traffic.count("uploads")
        bad = [x for x in bad if any(x is value for value in args[2:])]
    if bad:
        found = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in bad)
        raise MixedDevices(f"{func}: {found} beside tensors on {place}, at {line()}")


class Pretended(TorchDispatchMode):
    """While it is active, `device=` makes tensors of a pretended device, and their traffic is counted."""

    def __init__(self, traffic: Traffic):
        super().__init__()
        self.traffic = traffic

    def __enter__(self) -> "Pretended":
        self.before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=) makes its tensor on the CPU and moves it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self.before)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = any(isinstance(x, PretendTensor) for x in tree_leaves((args, kwargs)))
        if not ours and (kwargs.get("device") is None or torch.device(kwargs["device"]).type != NAME):
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return run(func, args, kwargs, self.traffic)


@contextmanager
def pretended() -> Iterator[Traffic]:
    """Yield the traffic of what runs inside, counted by rounds."""
    device()
    traffic, start_round = Traffic(), loop.start_round

    def begin(call: Any) -> Any:
        traffic.begin(call.rows.finished.count(False))
        return start_round(call)

    # Tensors of a subclass keep version counters, which those of inference mode have not.
    with (
        patch("torch.inference_mode", lambda mode=True: torch.no_grad()),
        patch.object(loop, "start_round", begin),
        Pretended(traffic),
    ):
        yield traffic


def moved(model: Any, place: torch.device | None = None) -> Any:
    """Return a copy of a model on a pretended device; tensors that it has twice are one there, too."""
    place, out = place or device(), copy.deepcopy(model)
    if hasattr(out, "set_attn_implementation"):
        out.set_attn_implementation("eager")
    made: dict[int, torch.Tensor] = {}
    for module in out.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None and id(tensor) not in made:
                    there, is_parameter = PretendTensor(tensor.detach(), place), isinstance(tensor, torch.nn.Parameter)
                    made[id(tensor)] = torch.nn.Parameter(there, False) if is_parameter else there
                store[name] = None if tensor is None else made[id(tensor)]
    return out
