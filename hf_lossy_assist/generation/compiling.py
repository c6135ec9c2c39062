"""How a call asks for compiled rounds, and which models they can be had of."""

from collections.abc import Mapping
from typing import Any

from transformers import CompileConfig

from ..models.architecture import Architecture
from ..models.inspect import base_of, has_fixed_rows, is_tested
from ..models.rope import ChangingRope
from ..models.static import Compilation
from ..validation import shown


STATIC = "static"
COMPILED = ("cache_implementation", "compile_config")


def compilation_of(cache_implementation: Any, compile_config: Any) -> Compilation | None:
    """What `cache_implementation="static"` and `compile_config=` ask for, or None.

    Raises: `TypeError`, one line, where `compile_config` is no `CompileConfig`.
    """
    if compile_config is not None and not isinstance(compile_config, CompileConfig | Mapping):
        raise TypeError(f"compile_config: expected a transformers.CompileConfig, got {shown(compile_config)}")
    if cache_implementation != STATIC and compile_config is None:
        return None
    given = CompileConfig() if compile_config is None else compile_config
    if isinstance(given, Mapping):  # as a generation config's file has it
        given = CompileConfig(**given)
    inductor = given.backend == "inductor"
    return Compilation(
        backend=given.backend,
        mode=given.mode if inductor and given.options is None else None,
        dynamic=bool(
            given.dynamic
        ),  # a graph for each shape, of which there are few, unless dynamic ones are asked for
        options=tuple((given.options or {}).items()),
    )


def why_not_compiled(model: Any) -> str | None:
    """Why blocks of this model cannot be compiled, or None."""
    base = base_of(model)
    name = type(base).__name__
    if not is_tested(base) or model is not base:
        return f"{name} is none of the architectures that are tested compiled"
    if ChangingRope.of(base, 1) is not None:
        return f"{name}'s RoPE changes with the length of the text"
    if has_fixed_rows(base):
        return "adapter_names gives each row its adapter"
    if len({p.device for p in base.parameters()}) > 1:
        return f"{name} is on several devices"
    if Architecture.of(base).mask_each_row:
        return f"{name} wants a mask for each row"
    return None
