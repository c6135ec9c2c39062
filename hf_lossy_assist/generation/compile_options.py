"""The compile settings of a call, and the pairs of models for which `warmup` found compiled rounds to be faster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from transformers import CompileConfig, GenerationConfig, PreTrainedModel

from ..batch.logits_processing import Processing
from ..batch.rows import Rows
from ..drafters.hidden_state import HiddenStateDrafter
from ..models.compiled.compilation import Compilation
from ..policy.policy import LossyPolicy
from ..stops import DraftStop
from ..validation import shown


STATIC = "static"
COMPILE_SETTINGS = ("cache_implementation", "compile_config", "disable_compile")


def make_compilation(
    cache_implementation: object, compile_config: object, disable_compile: object = None
) -> Compilation | None:
    """Return the compilation that `cache_implementation="static"` and `compile_config=` request, or None; `disable_compile=True` overrides both.

    Raises: `TypeError`, one line, if `compile_config` is no `CompileConfig`.
    """
    if compile_config is not None and not isinstance(compile_config, CompileConfig | Mapping):
        raise TypeError(f"compile_config: expected a transformers.CompileConfig, got {shown(compile_config)}")
    if disable_compile or (cache_implementation != STATIC and compile_config is None):
        return None
    given = CompileConfig() if compile_config is None else compile_config
    if isinstance(given, Mapping):  # from the file of a generation config
        given = CompileConfig(**given)
    return Compilation(
        backend=given.backend,
        mode=given.mode if given.backend == "inductor" and given.options is None else None,
        # One graph for each of the few shapes, unless dynamic shapes are requested.
        dynamic=bool(given.dynamic),
        options=tuple((given.options or {}).items()),
    )


@dataclass(frozen=True)
class GraphKey:
    """The key of calls that run the same graphs, except for the number of rows and the length of the text."""

    policy: str
    stop: str
    sampling: bool
    processors: tuple[str, ...]

    @classmethod
    def of(cls, policy: LossyPolicy, stop: DraftStop, processing: Processing, sampling: bool) -> "GraphKey":
        processors = [f"{type(p).__name__}({shown(vars(p), 1000)})" for p in processing.processors]
        return cls(str(policy), str(stop), sampling, tuple(processors))


@dataclass(frozen=True)
class WarmedUp:
    """The shapes that `warmup` compiled and found faster than eager rounds."""

    compilation: Compilation
    max_lengths: dict[int, int]  # number of rows → tokens of the longest text


_warmed_up: WeakKeyDictionary[PreTrainedModel, dict[tuple[ref[Any], GraphKey], WarmedUp]] = WeakKeyDictionary()


def remember(
    target: PreTrainedModel, draft: object, key: GraphKey, compilation: Compilation, rows: int, length: int
) -> None:
    """Run later calls with this key, this number of rows and at most this length compiled."""
    of_target = _warmed_up.setdefault(target, {})
    before = of_target.get((ref(draft), key))
    known = before.max_lengths if before is not None and before.compilation == compilation else {}
    of_target[ref(draft), key] = WarmedUp(compilation, {**known, rows: max(length, known.get(rows, 0))})


def forget(target: PreTrainedModel, draft: object, key: GraphKey, rows: int) -> None:
    """Run later calls with this key and number of rows eagerly."""
    known = _warmed_up.get(target, {}).get((ref(draft), key))
    if known is not None:
        known.max_lengths.pop(rows, None)


@dataclass(frozen=True)
class CompileOptions:
    """The compile settings of a runner.

    Args:
        compilation: how to compile rounds; None: not requested.
        automatic: if compilation is not requested, use what `warmup` found to be faster.
    """

    compilation: Compilation | None
    automatic: bool

    @classmethod
    def parse(cls, settings: Mapping[str, object]) -> "CompileOptions":
        """Parse `settings`, by the names in `COMPILE_SETTINGS`."""
        found = make_compilation(**settings)
        return cls(found, found is None and not settings["disable_compile"])

    def for_call(
        self, config: GenerationConfig, target: PreTrainedModel, draft: object, rows: Rows, *key: Any
    ) -> tuple[Compilation | None, tuple[int, ...] | None]:
        """Return how to compile the rounds of a call, and for which batch sizes; None if neither the caller nor `warmup` chose compilation.

        config: the call's generation config, for calls that do not come through `enable`. key: the arguments of `GraphKey.of`.
        """
        if not self.automatic:
            return self.compilation, None
        at_call = CompileOptions.parse({name: getattr(config, name, None) for name in COMPILE_SETTINGS})
        if at_call.compilation is not None or not at_call.automatic:
            return at_call.compilation, None
        of_target = _warmed_up.get(target)
        warms = isinstance(draft, PreTrainedModel | HiddenStateDrafter)  # other drafters may have no hash
        known = of_target.get((ref(draft), GraphKey.of(*key))) if of_target and warms else None
        if known is None or rows.max_length > known.max_lengths.get(len(rows.row_id_list), 0):
            return None, None
        return known.compilation, tuple(sorted(known.max_lengths))
