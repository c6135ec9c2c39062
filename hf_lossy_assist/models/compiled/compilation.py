"""Compile functions over models: options, guards, and failures that fall back to eager.

`torch.compile` checks before each call that nothing it relied on has changed: for a pair of small models some thousand checks, a fifth of a
round. What belongs to a model is checked here once a call of `generate` instead, by its `Signature`: another one is another function.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils._pytree import tree_map_only

from ...validation import one_line
from .signature import Signature, shared


# Raised because somebody asked for it: `error_on_recompile`, `fail_on_recompile_limit_hit`.
LOUD = ("RecompileError", "FailOnRecompileLimitHit")
FILTERS_GUARDS = (
    "guard_filter_fn" in inspect.signature(torch._dynamo.eval_frame._optimize).parameters
)  # since torch 2.7
# Names of what guards are about: a model's own, and the modules whose code is in a graph.
OF_A_MODEL = re.compile(r"\b(target|draft|block)\.(model|embedding|head)\b")
OF_LIBRARIES = re.compile(
    r"\bG\['(?!__import_)|\bG\['__import_(torch|transformers|hf_lossy_assist|math|typing|collections|functools)(_dot_|')"
)
# A cache's layers are alike, and its class is ours.
ONCE_SAID = re.compile(r"\.cache\.layers\[[1-9]\d*\]|\btype\(\w+\.cache\b")


@dataclass(frozen=True)
class Compilation:
    """The arguments of `torch.compile`, under its names."""

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    def of_any_length(self) -> "Compilation":
        """Return these for a function of a length that no two calls share: one graph for all, and none captured for a length."""
        if self.backend != "inductor":
            return self
        return replace(self, options=(*self.options, ("triton.cudagraphs", False)))

    def replays(self, devices: Collection[torch.device]) -> bool:
        """Return whether calls replay CUDA graphs, which read and write at the addresses that they were recorded with."""
        if not devices or any(device.type != "cuda" for device in devices):
            return False
        if self.backend != "inductor":
            return self.backend == "cudagraphs"
        options = torch._inductor.list_mode_options(self.mode, self.dynamic) if self.mode is not None else {}
        options = options | dict(self.options)
        return bool(options.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


def is_worth_checking(guard: Any) -> bool:
    """Return whether torch.compile shall check this before each call: the inputs and what code of the caller's reads, not the models' insides."""
    unwanted = (OF_A_MODEL, OF_LIBRARIES, ONCE_SAID)
    return guard.guard_type != "NOT_PRESENT_IN_GENERIC_DICT" and not any(name.search(guard.name) for name in unwanted)


def compiled(
    function: Callable[..., object], compilation: Compilation, signatures: Sequence[Signature] = ()
) -> Callable[..., Any]:
    """Return `function` through `torch.compile`, with a separate cache: other models' graphs do not count towards its limit.

    `signatures`: of the models within it; the caller has another function for others.
    """
    known = inspect.signature(torch.compile).parameters
    settings: dict[str, Any] = {"recompile_limit": 256} if "recompile_limit" in known else {}  # since torch 2.12
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
    # Graphs are found by their function's code: with the same code, guards that leave out the models would take another model's for this one's.
    alone = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    made = torch.compile(
        alone,
        backend=compilation.backend,
        dynamic=compilation.dynamic,
        fullgraph=compilation.fullgraph,
        options=options or None,
        **settings,
    )
    devices = frozenset[torch.device]().union(*(signature.devices for signature in signatures))
    if not compilation.replays(devices):
        return made
    # Tensors that a CUDA graph returns are overwritten by the next one that is replayed.
    return lambda *args: tree_map_only(torch.Tensor, torch.clone, made(*args))


def graphs_made() -> int:
    """Return how many graphs the compiler has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# What the compiler raises; a guard that fails at once, as one on a number of NumPy's does, is a bare AssertionError.
FAILURES = (RuntimeError, AssertionError)


def failure(error: BaseException) -> str:
    """Return the compiler's failure in one line, after a warning with it. An error that is none of the compiler's is raised again."""
    places = {kind.__module__.partition(".")[2].partition(".")[0] for kind in type(error).__mro__}
    guard = isinstance(error, AssertionError) and "Guard failed on the same frame" in str(error)
    if not (guard or places & {"_dynamo", "_inductor"}) or type(error).__name__ in LOUD:
        raise error
    reason = f"torch.compile could not compile it ({type(error).__name__}: {one_line(str(error), 200)})"
    warnings.warn(f"{reason}: what was to be compiled runs eagerly", stacklevel=4)
    return reason


_functions: WeakKeyDictionary[torch.nn.Module, dict[tuple[Any, ...], Callable[..., Any]]] = WeakKeyDictionary()


def compiled_once(
    function: Callable[..., object], compilation: Compilation, models: Sequence[tuple[torch.nn.Module, Signature]]
) -> Callable[..., Any]:
    """Return `function` of `models`, compiled; the same one for the same models as long as they are alike, whatever the number of calls."""
    (first, _), *others = models
    made = _functions.setdefault(first, {})
    key = (
        function,
        compilation,
        tuple(ref(model) for model, _ in others),
        tuple(signature.key for _, signature in models),
        shared([signature for _, signature in models]),
    )
    if key not in made:
        for other in [other for other in made if any(model() is None for model in other[2])]:
            del made[other]  # of a draft that is gone
        made[key] = compiled(function, compilation, [signature for _, signature in models])
    return made[key]
