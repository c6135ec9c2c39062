"""Compile functions over models: options, guards, and fallback to eager mode.

Before each call `torch.compile` checks that nothing it relied on has changed: some thousand guards for a pair of small models, a fifth of a round.
The guards on models are replaced here by one comparison of `Signature` per `generate` call; another signature gets another function.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils._pytree import tree_map_only
from transformers import CompileConfig

from ...validation import one_line, shown
from .signature import Signature, shared


STATIC = "static"
COMPILE_SETTINGS = ("cache_implementation", "compile_config", "disable_compile")  # of `generate`
# Errors that the user opted into: `error_on_recompile`, `fail_on_recompile_limit_hit`.
LOUD = ("RecompileError", "FailOnRecompileLimitHit")
FILTERS_GUARDS = (
    "guard_filter_fn" in inspect.signature(torch._dynamo.eval_frame._optimize).parameters
)  # since torch 2.7
# Names of guards on a model's internals, and on modules whose code is in a graph.
OF_A_MODEL = re.compile(r"\b(target|draft|block)\.(model|embedding|head)\b")
OF_LIBRARIES = re.compile(
    r"\bG\['(?!__import_)|\bG\['__import_(torch|transformers|hf_lossy_assist|math|typing|collections|functools)(_dot_|')"
)
# Guards that repeat others: the layers of a cache are alike, and its class belongs to this package.
ONCE_SAID = re.compile(r"\.cache\.layers\[[1-9]\d*\]|\btype\(\w+\.cache\b")


@dataclass(frozen=True)
class Compilation:
    """Arguments of `torch.compile`, under the same names."""

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def requested(
        cls, cache_implementation: object = None, compile_config: object = None, disable_compile: object = None
    ) -> "Compilation | None":
        """Return what `cache_implementation="static"` and `compile_config=` request, or None; `disable_compile=True` overrides both.

        Raises: `TypeError`, one line, if `compile_config` is no `CompileConfig`.
        """
        if compile_config is not None and not isinstance(compile_config, CompileConfig | Mapping):
            raise TypeError(f"compile_config: expected a transformers.CompileConfig, got {shown(compile_config)}")
        if disable_compile or (cache_implementation != STATIC and compile_config is None):
            return None
        given = CompileConfig() if compile_config is None else compile_config
        if isinstance(given, Mapping):  # from the file of a generation config
            given = CompileConfig(**given)
        return cls(
            backend=given.backend,
            mode=given.mode if given.backend == "inductor" and given.options is None else None,
            # One graph for each of the few shapes, unless dynamic shapes are requested.
            dynamic=bool(given.dynamic),
            options=tuple((given.options or {}).items()),
        )

    def replays(self, devices: Collection[torch.device]) -> bool:
        """Return whether calls replay CUDA graphs, which read and write the addresses that they were recorded with."""
        if not devices or any(device.type != "cuda" for device in devices):
            return False
        if self.backend != "inductor":
            return self.backend == "cudagraphs"
        options = torch._inductor.list_mode_options(self.mode, self.dynamic) if self.mode is not None else {}
        options = options | dict(self.options)
        return bool(options.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


def is_worth_checking(guard: Any) -> bool:
    """Return whether torch.compile shall evaluate this guard before each call: guards on inputs and user code, not on the models' internals."""
    unwanted = (OF_A_MODEL, OF_LIBRARIES, ONCE_SAID)
    return guard.guard_type != "NOT_PRESENT_IN_GENERIC_DICT" and not any(name.search(guard.name) for name in unwanted)


def compiled(
    function: Callable[..., object], compilation: Compilation, signatures: Sequence[Signature] = ()
) -> Callable[..., Any]:
    """Return `function` compiled by `torch.compile`, with a separate cache, so graphs of other models do not count towards its limit.

    `signatures`: those of the models it runs; the caller needs another function for other models.
    """
    known = inspect.signature(torch.compile).parameters
    settings: dict[str, Any] = {"recompile_limit": 256} if "recompile_limit" in known else {}  # since torch 2.12
    options = dict(compilation.options)
    if all(signature.trusted for signature in signatures) and FILTERS_GUARDS:
        options.setdefault("guard_filter_fn", lambda guards: [is_worth_checking(guard) for guard in guards])
    if compilation.backend == "inductor":
        if compilation.mode is not None:  # torch.compile takes a mode or options; a mode is a named set of options
            options = torch._inductor.list_mode_options(compilation.mode, compilation.dynamic) | options
        if {device.type for signature in signatures for device in signature.devices} == {"cpu"}:
            options.pop("triton.cudagraphs", None)  # set by the default mode
            # Calls the kernels from C++ too, which is most of a round with small models. Without optimisation the wrapper compiles in two thirds
            # of
            # the time and runs as fast (docs/log.md).
            options = {
                "cpp_wrapper": True,
                "cpp_wrapper_build_separate": True,
                "aot_inductor.compile_wrapper_opt_level": "O0",
            } | options
    # torch.compile finds graphs by code object: since the guards leave out the models, functions that shared one would run each other's graphs.
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
    # A CUDA graph's output tensors are overwritten by the next replay.
    return lambda *args: tree_map_only(torch.Tensor, torch.clone, made(*args))


def graphs_made() -> int:
    """Return the number of graphs compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# Errors of the compiler; a guard that fails at once, as one on a NumPy number does, is a bare AssertionError.
FAILURES = (RuntimeError, AssertionError)


def failure(error: BaseException) -> str:
    """Warn of a compiler error and return it in one line. Any other error is raised again."""
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
    """Return `function` compiled for `models`; calls with the same unchanged models share one compiled function."""
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
            del made[other]  # of a draft that was freed
        made[key] = compiled(function, compilation, [signature for _, signature in models])
    return made[key]
