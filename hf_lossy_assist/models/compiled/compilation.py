"""Compile functions over models: options, guards, and fallback to eager mode.

Before each call `torch.compile` checks that nothing it relied on has changed: some thousand guards for a pair of small
models, a fifth of a round. The guards on models are replaced here by one comparison of `Signature` per `generate` call;
another signature gets another function. Models with code of a user keep their guards.
"""

import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils._pytree import tree_map_only
from transformers import CompileConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...validation import one_line, shown
from ..introspection import TENSORS, attention_of, remember


STATIC = "static"
COMPILE_SETTINGS = ("cache_implementation", "compile_config", "disable_compile")  # of `generate`
# Errors that the user opted into: `error_on_recompile`, `fail_on_recompile_limit_hit`.
LOUD = ("RecompileError", "FailOnRecompileLimitHit")
FILTERS_GUARDS = (
    "guard_filter_fn" in inspect.signature(torch._dynamo.eval_frame._optimize).parameters
)  # since torch 2.7
# Names of guards on modules whose code is in a graph.
LIBRARIES = re.compile(
    r"\bG\['(?!__import_)|\bG\['__import_(torch|transformers|hf_lossy_assist|math|typing|collections|functools)(_dot_|')"
)
# Names of guards that repeat others: the layers of a `RowCache` are alike, and its class belongs to this package.
REPEATED = re.compile(r"\.cache\.layers\[[1-9]\d*\]|\btype\(\w+\.cache\b")


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
        """Return what `cache_implementation="static"` and `compile_config=` request, or None; `disable_compile=True`
        overrides both.

        Raises: `TypeError`, one line, if `compile_config` is no `CompileConfig`.
        """
        if compile_config is not None and not isinstance(compile_config, CompileConfig | Mapping):
            raise TypeError(f"compile_config: expected a transformers.CompileConfig, got {shown(compile_config)}")
        if disable_compile or (cache_implementation != STATIC and compile_config is None):
            return None
        config = CompileConfig() if compile_config is None else compile_config
        if isinstance(config, Mapping):  # from the file of a generation config
            config = CompileConfig(**config)
        return cls(
            backend=config.backend,
            mode=config.mode if config.backend == "inductor" and config.options is None else None,
            # One graph for each of the few shapes, unless dynamic shapes are requested.
            dynamic=bool(config.dynamic),
            options=tuple((config.options or {}).items()),
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


# Packages whose modules are determined by their class, tensors, plain attributes and config.
TRUSTED = ("torch.nn.", "transformers.", __package__.partition(".")[0] + ".")
PLAIN = frozenset([bool, int, float, str, type(None), torch.dtype, torch.device])
# Transformers leaves its hooks on a model that once returned hidden states; they do nothing until these are requested
# again.
CAPTURING = "transformers.utils.output_capturing"
LEFT = {"_output_capturing_hooks_installed", "_previous_max_cache_length"}  # on a model; no forward reads them
PACKED = "its weights are packed by PyTorch's own quantisation, into which torch.compile cannot look"


class Signature(NamedTuple):
    """A model's side of a graph: all that it relies on besides its inputs, read once per call.

    Read: classes and their forwards, plain attributes (training mode is one), layouts of parameters and buffers, the
    config and the attention function that it names.
    """

    key: int  # equal for two models, or two states of one, that are alike to a graph
    trusted: bool  # the key covers everything; else torch.compile also guards the user's code
    hooked: str | None  # why a graph cannot be made, or would skip something once compiled
    devices: frozenset[torch.device]
    tensors: Mapping[int, int]  # index of each of the model's tensors, by its `id`

    @classmethod
    def of(cls, model: torch.nn.Module) -> "Signature":
        state, modules, indices, hooked = _settings(model), [model], dict[int, int](), False
        for module in modules:  # grows
            attrs = module.__dict__  # attributes of modules take microseconds
            kind, children = type(module), attrs["_modules"]
            state += (kind, kind.forward, "forward" in attrs, *children)
            state += [value for name, value in attrs.items() if type(value) in PLAIN and name not in LEFT]
            for tensors in (attrs["_parameters"], attrs["_buffers"]):
                # A graph reads a tensor that occurs twice from its first place.
                state += [
                    None if x is None else (indices.setdefault(id(x), len(indices)), _layout(x))
                    for x in tensors.values()
                ]
            hooked |= bool(attrs["_forward_hooks"] or attrs["_forward_pre_hooks"] or "_hf_hook" in attrs)
            modules += filter(None, children.values())
        seen = tuple(state)
        if seen not in _states:
            packed = any(
                isinstance(value, torch.ScriptObject) for module in modules for value in vars(module).values()
            )
            devices = frozenset(x.device for x in _tensors(modules))
            _states[seen] = next(_count), _is_trusted(modules, state), PACKED if packed else None, devices
        key, trusted, reason, devices = _states[seen]
        if torch.nn.modules.module._has_any_global_hook():
            reason = "a forward hook stands on every module"
        elif hooked:
            reason = _find_hook(model) or reason
        return cls(key, trusted, reason, devices, indices)


# What follows from each state of a model: its number, whether it is trusted, why it is never compiled, its devices.
_states: dict[tuple[object, ...], tuple[int, bool, str | None, frozenset[torch.device]]] = {}
_count = itertools.count()


def _settings(model: torch.nn.Module) -> list[object]:
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel):
        return [repr(config)]
    attention = attention_of(model.config)
    text = remember(model, "settings", lambda: repr(vars(model.config) | {"_attn_implementation_internal": attention}))
    return [text, ALL_ATTENTION_FUNCTIONS.get(attention)]


def _layout(x: torch.Tensor) -> object:
    layout = (x.stride(), x.storage_offset()) if x.layout is torch.strided else x.layout
    return type(x), x.shape, layout, x.dtype, x.device, x.is_inference()


def _tensors(modules: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)


def _is_trusted(modules: Sequence[torch.nn.Module], state: Sequence[object]) -> bool:
    """Return whether no code or tensor type of a user is in a model."""
    code = {code_object for code_object in state if isinstance(code_object, type | FunctionType)}
    replaced = any("forward" in vars(module) for module in modules)
    ours = all(f"{code_object.__module__}.".startswith(TRUSTED) for code_object in code)
    return ours and not replaced and all(type(x) in TENSORS for x in _tensors(modules))


def _find_hook(model: torch.nn.Module) -> str | None:
    """Say where a hook stands that a graph would skip."""
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "_hf_hook" in vars(module) or any(hook.__module__ != CAPTURING for hook in hooks):
            return f"a forward hook stands on {name or type(module).__name__}"
    return None


def shared(signatures: Sequence[Signature]) -> tuple[tuple[int, ...], ...]:
    """Return the tensors that two models share, as pairs of model and tensor indices: a graph reads only one of the two
    places."""
    return tuple(
        (i, j, index, other.tensors[tensor])
        for (i, one), (j, other) in itertools.combinations(enumerate(signatures), 2)
        if not one.tensors.keys().isdisjoint(other.tensors)
        for tensor, index in one.tensors.items()
        if tensor in other.tensors
    )


def worth_checking(guards: Sequence[Any], models: Collection[int]) -> list[bool]:
    """Return which guards torch.compile shall evaluate before each call: those on inputs and user code.

    Not those on what is reached through one of the modules whose `id`s are `models`.
    """
    names = {guard.name for guard in guards if guard.has_value and id(guard.value) in models}
    roots = [rf"(?<!\w){re.escape(name)}\b" for name in names if "._modules[" not in name]
    unwanted = re.compile("|".join([*roots, LIBRARIES.pattern, REPEATED.pattern]))
    return [
        guard.guard_type != "NOT_PRESENT_IN_GENERIC_DICT" and unwanted.search(guard.name) is None for guard in guards
    ]


def compiled(
    function: Callable[..., object], compilation: Compilation, models: Sequence[tuple[torch.nn.Module, Signature]]
) -> Callable[..., Any]:
    """Return `function` compiled by `torch.compile`, with a separate cache, so graphs of other models do not count
    towards its limit.

    `models`: those that it runs; the caller needs another function for other models.
    """
    signatures = [signature for _, signature in models]
    parameters = inspect.signature(torch.compile).parameters
    settings: dict[str, Any] = {"recompile_limit": 256} if "recompile_limit" in parameters else {}  # since torch 2.12
    options = dict(compilation.options)
    if all(signature.trusted for signature in signatures) and FILTERS_GUARDS:
        modules = {id(module) for model, _ in models for module in model.modules()}
        options.setdefault("guard_filter_fn", lambda guards: worth_checking(guards, modules))
    if compilation.backend == "inductor":
        if compilation.mode is not None:  # torch.compile takes a mode or options; a mode is a named set of options
            options = torch._inductor.list_mode_options(compilation.mode, compilation.dynamic) | options
        if {device.type for signature in signatures for device in signature.devices} == {"cpu"}:
            options.pop("triton.cudagraphs", None)  # set by the default mode
            # Calls the kernels from C++ too, which is most of a round with small models. Without optimisation the
            # wrapper compiles in two thirds of the time and runs as fast (docs/log.md).
            options = {
                "cpp_wrapper": True,
                "cpp_wrapper_build_separate": True,
                "aot_inductor.compile_wrapper_opt_level": "O0",
            } | options
    # torch.compile finds graphs by code object: since the guards leave out the models, functions that shared one would
    # run each other's graphs.
    alone = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    compiled_function = torch.compile(
        alone,
        backend=compilation.backend,
        dynamic=compilation.dynamic,
        fullgraph=compilation.fullgraph,
        options=options or None,
        **settings,
    )
    devices = frozenset[torch.device]().union(*(signature.devices for signature in signatures))
    if not compilation.replays(devices):
        return compiled_function
    # A CUDA graph's output tensors are overwritten by the next replay.
    return lambda *args: tree_map_only(torch.Tensor, torch.clone, compiled_function(*args))


def graphs_made() -> int:
    """Return the number of graphs compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# Errors of the compiler; a guard that fails at once, as one on a NumPy number does, is a bare AssertionError.
FAILURES = (RuntimeError, AssertionError)


def failure(error: BaseException) -> str:
    """Warn of a compiler error and return it in one line. Any other error is raised again."""
    modules = {kind.__module__.partition(".")[2].partition(".")[0] for kind in type(error).__mro__}
    guard = isinstance(error, AssertionError) and "Guard failed on the same frame" in str(error)
    if not (guard or modules & {"_dynamo", "_inductor"}) or type(error).__name__ in LOUD:
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
    functions = _functions.setdefault(first, {})
    key = (
        function,
        compilation,
        tuple(ref(model) for model, _ in others),
        tuple(signature.key for _, signature in models),
        shared([signature for _, signature in models]),
    )
    if key not in functions:
        for other in [other for other in functions if any(model() is None for model in other[2])]:
            del functions[other]  # of a draft that was freed
        functions[key] = compiled(function, compilation, models)
    return functions[key]
