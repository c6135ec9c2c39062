"""How functions over models are compiled, what a compiled one takes for granted, and what is said where that fails.

`torch.compile` checks before each call that nothing it relied on has changed: for a pair of small models some thousand checks, a fifth of a
round. What belongs to a model is checked here once a call of `generate` instead, by its `Signature`: another one is another function.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from ..validation import one_line


# Raised because somebody asked for it: `error_on_recompile`, `fail_on_recompile_limit_hit`.
LOUD = ("RecompileError", "FailOnRecompileLimitHit")
FILTERS_GUARDS = (
    "guard_filter_fn" in inspect.signature(torch._dynamo.eval_frame._optimize).parameters
)  # since torch 2.7
# Transformers leaves its own hooks on a model that was once asked for its hidden states; they do nothing until it is asked again.
CAPTURING = "transformers.utils.output_capturing"
TRUSTED = (
    "torch.nn.",
    "transformers.",
    "hf_lossy_assist.models.prepack",
)  # whose modules are what their class, their tensors and their config make them
PLAIN = (int, float, str, type(None))  # what a graph may have made a constant of
# Names of what guards are about: a model's own, and the modules whose code is in a graph.
OF_A_MODEL = re.compile(r"\b(target|draft|block)\.model\b")
OF_LIBRARIES = re.compile(
    r"\bG\['(?!__import_)|\bG\['__import_(torch|transformers|hf_lossy_assist|math|typing|collections|functools)(_dot_|')"
)
# A cache's layers are alike, and its class is ours.
ONCE_SAID = re.compile(r"\.cache\.layers\[[1-9]\d*\]|\btype\(\w+\.cache\b")


@dataclass(frozen=True)
class Compilation:
    """How `torch.compile` is called; the names are its own."""

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    def of_any_length(self) -> "Compilation":
        """For a function of a length that no two calls share: one graph for all, and none captured for a length."""
        if self.backend != "inductor":
            return self
        return replace(self, options=(*self.options, ("triton.cudagraphs", False)))

    def replays(self, devices: Collection[torch.device]) -> bool:
        """Whether calls replay CUDA graphs, which read and write at the addresses that they were recorded with."""
        if not devices or any(device.type != "cuda" for device in devices):
            return False
        if self.backend != "inductor":
            return self.backend == "cudagraphs"
        options = torch._inductor.list_mode_options(self.mode, self.dynamic) if self.mode is not None else {}
        options = options | dict(self.options)
        return bool(options.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


class Signature(NamedTuple):
    """What a graph of a model relies on beside its inputs, read off the model once a call."""

    key: int  # two models of one key, or one at two times, are alike to a graph
    trusted: bool  # the key says all: every module is PyTorch's or Transformers' own, as it was made
    hooked: str | None  # what a graph, once compiled, would not run again, or cannot be made of
    devices: frozenset[torch.device]
    tensors: dict[int, int]  # by the id of each tensor of the model, its number

    @classmethod
    def of(cls, model: torch.nn.Module) -> "Signature":
        seen: list[Any] = [*_settings(getattr(model, "config", None))]
        trusted, hooked, devices, tensors = True, None, set(), dict[int, int]()
        if torch.nn.modules.module._global_forward_hooks or torch.nn.modules.module._global_forward_pre_hooks:
            hooked = "a forward hook stands on every module"
        waiting = [("", model)]
        while waiting:
            name, module = waiting.pop()
            kind = type(module)
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if "_hf_hook" in module.__dict__ or any(hook.__module__ != CAPTURING for hook in hooks):
                hooked = hooked or f"a forward hook stands on {name or kind.__name__}"
            if any(isinstance(value, torch.ScriptObject) for value in vars(module).values()):
                hooked = (
                    hooked
                    or "its weights are packed by PyTorch's own quantisation, into which torch.compile cannot look"
                )
            trusted = trusted and kind.__module__.startswith(TRUSTED) and "forward" not in module.__dict__
            seen += [kind, kind.forward, *_settings(module)]
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    # Where one tensor stands twice, a graph reads it at the first place alone.
                    seen += [tensor.shape, tensor.dtype, tensor.device, tensors.setdefault(id(tensor), len(tensors))]
                    devices.add(tensor.device)
            waiting += [
                (f"{name}.{own}" if name else own, part) for own, part in module._modules.items() if part is not None
            ]
        return cls(_keys.setdefault(tuple(seen), len(_keys)), trusted, hooked, frozenset(devices), tensors)


def _settings(owner: Any) -> list[tuple[str, Any]]:
    """What a forward may read of its config or its module: an early exit, say, has another number of layers."""
    return [(name, value) for name, value in vars(owner or object).items() if isinstance(value, PLAIN)]


def shared(signatures: Sequence[Signature]) -> tuple[tuple[int, ...], ...]:
    """Which tensors two models have in common, each as the models' and the tensor's numbers: a graph reads one of the two places."""
    return tuple(
        (i, j, number, other.tensors[tensor])
        for (i, one), (j, other) in combinations(enumerate(signatures), 2)
        if not one.tensors.keys().isdisjoint(other.tensors)
        for tensor, number in one.tensors.items()
        if tensor in other.tensors
    )


_keys: dict[Hashable, int] = {}  # by all that was read: a number is hashed faster


def is_worth_checking(guard: Any) -> bool:
    """Whether torch.compile shall check this before each call: the inputs and what code of the caller's reads, not the models' insides."""
    unwanted = (OF_A_MODEL, OF_LIBRARIES, ONCE_SAID)
    return guard.guard_type != "NOT_PRESENT_IN_GENERIC_DICT" and not any(name.search(guard.name) for name in unwanted)


def compiled(
    function: Callable[..., Any], compilation: Compilation, signatures: Sequence[Signature] = ()
) -> Callable[..., Any]:
    """`function` through `torch.compile`, with a cache of its own: other models' graphs do not count towards its limit.

    `signatures`: of the models within it; the caller has another function for others.
    """
    known = inspect.signature(torch.compile).parameters
    new = {"isolate_recompiles": True, "recompile_limit": 256}  # of torch 2.12
    settings: dict[str, Any] = {name: value for name, value in new.items() if name in known}
    options = dict(compilation.options)
    if all(signature.trusted for signature in signatures) and FILTERS_GUARDS:
        options.setdefault("guard_filter_fn", lambda guards: [is_worth_checking(guard) for guard in guards])
    if compilation.backend == "inductor":
        if compilation.mode is not None:  # torch.compile takes a mode or options; a mode is options by name
            options = torch._inductor.list_mode_options(compilation.mode, compilation.dynamic) | options
        if {device.type for signature in signatures for device in signature.devices} == {"cpu"}:
            options.pop("triton.cudagraphs", None)  # of the default mode
            # The calls of the kernels in C++ as well: a round of small models is mostly these. Not optimised, that compiles in two thirds
            # of the time and runs as fast (docs/log.md).
            options = {
                "cpp_wrapper": True,
                "cpp_wrapper_build_separate": True,
                "aot_inductor.compile_wrapper_opt_level": "O0",
            } | options
    made = torch.compile(
        function,
        backend=compilation.backend,
        dynamic=compilation.dynamic,
        fullgraph=compilation.fullgraph,
        options=options or None,
        **settings,
    )
    devices = frozenset[torch.device]().union(*(signature.devices for signature in signatures))
    return (lambda *args: copied(made(*args))) if compilation.replays(devices) else made


def copied(out: Any) -> Any:
    """`out` in tensors of its own: those that a CUDA graph returns are overwritten by the next one that is replayed."""
    if isinstance(out, torch.Tensor):
        return out.clone()
    if isinstance(out, tuple):
        parts = [copied(part) for part in out]
        return type(out)(*parts) if hasattr(out, "_fields") else tuple(parts)
    return out


def graphs_made() -> int:
    """How many graphs the compiler has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# What the compiler raises; a guard that fails at once, as one on a number of NumPy's does, is a bare AssertionError.
FAILURES = (RuntimeError, AssertionError)


def failure(error: BaseException) -> str:
    """What the compiler could not do, in one line, said once. What is none of the compiler's is raised again."""
    places = {kind.__module__.partition(".")[2].partition(".")[0] for kind in type(error).__mro__}
    guard = isinstance(error, AssertionError) and "Guard failed on the same frame" in str(error)
    if not (guard or places & {"_dynamo", "_inductor"}) or type(error).__name__ in LOUD:
        raise error
    reason = f"torch.compile could not compile it ({type(error).__name__}: {one_line(str(error), 200)})"
    warnings.warn(f"{reason}: what was to be compiled runs eagerly", stacklevel=4)
    return reason


_functions: WeakKeyDictionary[Any, dict[Hashable, Callable[..., Any]]] = WeakKeyDictionary()


def compiled_once(
    function: Callable[..., Any], compilation: Compilation, models: Sequence[tuple[Any, Signature]]
) -> Callable[..., Any]:
    """`function` of `models`, compiled; the same one for the same models as long as they are alike, whatever the number of calls."""
    (first, _), *others = models
    own = _functions.setdefault(first, {})
    key = (
        function,
        compilation,
        tuple(ref(model) for model, _ in others),
        tuple(signature.key for _, signature in models),
        shared([signature for _, signature in models]),
    )
    if key not in own:
        own[key] = compiled(function, compilation, [signature for _, signature in models])
    return own[key]
