"""How a call asks for compiled rounds, which models they can be had of, and what `warmup` found out for calls that ask for nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from transformers import CompileConfig

from ..batch.logits_processing import Processing
from ..batch.rows import Rows
from ..models.compiled.compilation import Compilation
from ..policy.policy import LossyPolicy
from ..stops import DraftStop
from ..validation import shown


STATIC = "static"
COMPILED = ("cache_implementation", "compile_config", "disable_compile")


def compilation_of(cache_implementation: Any, compile_config: Any, disable_compile: Any = None) -> Compilation | None:
    """What `cache_implementation="static"` and `compile_config=` ask for, or None; `disable_compile=True` takes both back.

    Raises: `TypeError`, one line, where `compile_config` is no `CompileConfig`.
    """
    if compile_config is not None and not isinstance(compile_config, CompileConfig | Mapping):
        raise TypeError(f"compile_config: expected a transformers.CompileConfig, got {shown(compile_config)}")
    if disable_compile or (cache_implementation != STATIC and compile_config is None):
        return None
    given = CompileConfig() if compile_config is None else compile_config
    if isinstance(given, Mapping):  # as a generation config's file has it
        given = CompileConfig(**given)
    inductor = given.backend == "inductor"
    return Compilation(
        backend=given.backend,
        mode=given.mode if inductor and given.options is None else None,
        dynamic=bool(given.dynamic),  # a graph for each shape, of which there are few, unless dynamic ones are asked for
        options=tuple((given.options or {}).items()),
    )  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Calls that run the same graphs, but for the number of rows and the length of the text."""

    policy: str
    stop: str
    sampling: bool
    processors: tuple[str, ...]

    @classmethod
    def of(cls, policy: LossyPolicy, stop: DraftStop, processing: Processing, sampling: bool) -> "Kind":
        processors = [f"{type(p).__name__}({shown(vars(p), 1000)})" for p in processing.processors]
        return cls(str(policy), str(stop), sampling, tuple(processors))


@dataclass(frozen=True)
class Ready:
    """What `warmup` compiled and found faster than eager rounds."""

    compilation: Compilation
    reach: dict[int, int]  # by the number of rows, the tokens of the longest text


_ready: WeakKeyDictionary[Any, dict[tuple[Any, Kind], Ready]] = WeakKeyDictionary()


def remember(target: Any, draft: Any, kind: Kind, compilation: Compilation, rows: int, reach: int) -> None:
    """Let later calls of this kind know that they had better run compiled."""
    own = _ready.setdefault(target, {})
    before = own.get((ref(draft), kind))
    known = before.reach if before is not None and before.compilation == compilation else {}
    own[ref(draft), kind] = Ready(compilation, {**known, rows: max(reach, known.get(rows, 0))})


def forget(target: Any, draft: Any, kind: Kind, rows: int) -> None:
    """Let later calls of this kind and number of rows run eagerly."""
    known = _ready.get(target, {}).get((ref(draft), kind))
    if known is not None:
        known.reach.pop(rows, None)


@dataclass(frozen=True)
class Compiling:
    """What a runner was asked for.

    Args:
        compilation: how rounds are compiled; None: nobody said.
        automatic: calls of which nobody said anything run as `warmup` found them to be faster.
    """

    compilation: Compilation | None
    automatic: bool

    @classmethod
    def asked(cls, settings: Mapping[str, Any]) -> "Compiling":
        """`settings`: by the names in `COMPILED`."""
        found = compilation_of(**settings)
        return cls(found, found is None and not settings["disable_compile"])

    def of_call(
        self, config: Any, target: Any, draft: Any, kind: tuple[LossyPolicy, DraftStop, Processing, bool], rows: Rows
    ) -> tuple[Compilation | None, tuple[int, ...] | None]:
        """How the rounds of a call are compiled, and for which numbers of rows; nothing is compiled that nobody asked for.

        `config`: the call's generation config, which says something where it does not come through `enable`. `kind`: as of `Kind.of`.
        """
        if not self.automatic:
            return self.compilation, None
        at_call = Compiling.asked({name: getattr(config, name, None) for name in COMPILED})
        if at_call.compilation is not None or not at_call.automatic:
            return at_call.compilation, None
        known = None
        if draft is not None and _ready.get(target):
            known = _ready[target].get((ref(draft), Kind.of(*kind)))
        if known is None or rows.max_length > known.reach.get(len(rows.row_id_list), 0):
            return None, None
        return known.compilation, tuple(sorted(known.reach))
