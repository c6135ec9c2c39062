"""The registry's entries for rules, stops, filters, drafters and methods, with checks that they can be listed and serialised."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..validation import nearest, shown
from .discovery import PACKAGE, Kind


Guarantee = Literal["lossless", "lossy", "depends"]
Need = Literal["head", "profile", "companion"]

GUARANTEES: tuple[Guarantee, ...] = ("lossless", "lossy", "depends")
NEEDS: tuple[Need, ...] = ("head", "profile", "companion")
REQUIRED = "required"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ARXIV = re.compile(r"\d{4}\.\d{5}")


@dataclass(frozen=True)
class HeadKind:
    """The heads that a method uses: the event whose probability they compute, and the position of the state that they read."""

    polarity: Literal["acceptable", "important"]
    position: Literal["predicting", "token"] | None = None  # None: either
    label: str = ""  # the label of the training data, as a formula or a sentence


@dataclass(frozen=True)
class Entry:
    """A name for a policy's JSON form, `lossy_policy=` and the command line.

    Args:
        make: the class of a rule, stop, filter or drafter; the recipe of a method, a function that returns a `LossyPolicy`.
        guarantee: of a method: "lossless", "lossy", or "depends", on `condition`. A class says it by its attribute `lossless`.
        neutral: parameters, in JSON form, with which a rule is bit-equal to strict acceptance and a filter or method lossless, whatever
            the other parameters. None: every setting is lossless.
        neutral_text: the same for readers; default: the parameters.
        beside: other parts of a policy, in JSON form, that the neutral setting needs.
        paper: an arXiv number, an address, or the name of an engine; "" for this package.
        summary: one sentence; default: the first line of the docstring.
        ladder: a parameter of a lossy rule or method, and values from strict to lax for `hf-lossy tune`.
        example: a value, in JSON form, for each parameter without a default; default: a value of the ladder.
    """

    kind: Kind
    name: str
    make: Callable[..., Any]
    guarantee: Guarantee = "lossless"
    summary: str = ""
    neutral: Mapping[str, object] | None = None
    paper: str = ""
    condition: str = ""
    neutral_text: str = ""
    beside: Mapping[str, object] = field(default_factory=dict)
    example: Mapping[str, object] = field(default_factory=dict)
    ladder: tuple[str, tuple[object, ...]] | None = None

    def __post_init__(self) -> None:
        what = f"register_{self.kind}: {self.name}"
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"register_{self.kind}: expected a name of a-z, 0-9 and _, got {shown(self.name)}")
        if self.summary == "":
            object.__setattr__(self, "summary", (inspect.getdoc(self.make) or "").partition("\n")[0])
        if inspect.isclass(self.make):
            object.__setattr__(self, "guarantee", self._find_guarantee(what))
        elif self.guarantee not in GUARANTEES:
            raise ValueError(f"{what}: {nearest('guarantee', str(self.guarantee), GUARANTEES)}")
        if self.guarantee == "lossy" and self.neutral is None:
            raise ValueError(f"{what}: a lossy {self.kind} needs a neutral setting: neutral={{'threshold': 0.0}}")
        unknown = sorted({*(self.neutral or {}), *(self.ladder or ())[:1]} - set(self.parameters))
        if unknown and self.parameters:  # a class without parameters is no dataclass, for which `check_make` raises
            raise ValueError(f"{what}: {nearest('parameter', unknown[0], self.parameters)}")
        if self.ladder is not None and not self.example and self.required == [self.ladder[0]]:
            name, values = self.ladder
            object.__setattr__(self, "example", {name: values[len(values) // 2]})

    def _find_guarantee(self, what: str) -> Guarantee:
        lossless = getattr(self.make, "lossless", True)
        if self.condition:
            return "depends"
        if not isinstance(lossless, bool):
            raise ValueError(
                f"{what}: {self.make.__name__}.lossless is a property: say by condition='…' on what it depends"
            )
        return "lossless" if lossless else "lossy"

    @property
    def parameters(self) -> dict[str, object]:
        """Each parameter's default; `REQUIRED` if it has none."""
        if dataclasses.is_dataclass(self.make):
            return {f.name: _find_default(f) for f in dataclasses.fields(self.make) if f.init}
        if inspect.isclass(self.make):  # a drafter that is no dataclass
            return {}
        parameters = inspect.signature(self.make).parameters.values()
        return {p.name: REQUIRED if p.default is p.empty else p.default for p in parameters}

    @property
    def required(self) -> list[str]:
        """The parameters without a default."""
        return [name for name, default in self.parameters.items() if default == REQUIRED]

    @property
    def source(self) -> str:
        """The source: a paper's address, an engine, or the package that registered it."""
        if _ARXIV.fullmatch(self.paper):
            return f"huggingface.co/papers/{self.paper}"
        package = str(getattr(self.make, "__module__", "")).partition(".")[0]
        return self.paper or ("this package" if package == PACKAGE else package)

    @property
    def neutral_in_words(self) -> str:
        """The neutral setting, for readers."""
        if self.neutral_text or self.neutral:
            settings = ", ".join(f"{name} = {value}" for name, value in (self.neutral or {}).items())
            return self.neutral_text or settings.replace("-inf", "−∞").replace("inf", "∞")
        return "every setting" if self.parameters else "itself"

    @property
    def neutral_spec(self) -> dict[str, object]:
        """The JSON form of a policy with this rule, stop or filter at its neutral setting."""
        return {self.kind: {"name": self.name, **self.example, **(self.neutral or {})}, **self.beside}


@dataclass(frozen=True)
class Method(Entry):
    """A published method: a recipe and its requirements.

    `needs`: required parameters of the recipe among "head", "profile" and "companion". `title`: display name.
    """

    needs: tuple[Need, ...] = ()
    head_kind: HeadKind | None = None
    title: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for need in self.needs:
            if need not in NEEDS or need not in self.parameters:
                raise ValueError(f"register_method: {self.name}: needs: the recipe has no parameter {shown(need)}")
        if ("head" in self.needs) != (self.head_kind is not None):
            raise ValueError(f"register_method: {self.name}: needs=('head',) and head_kind= belong together")


def _find_default(parameter: "dataclasses.Field[object]") -> object:
    if parameter.default_factory is not dataclasses.MISSING:
        return parameter.default_factory()
    return REQUIRED if parameter.default is dataclasses.MISSING else parameter.default


def check_make(what: str, entry: Entry, base: type | None) -> None:
    """Raise an error for a class or recipe that cannot be listed, serialised or read back."""
    make: Any = entry.make
    if entry.kind == "method":
        return
    if not inspect.isclass(make) or (base is not None and not issubclass(make, base)):
        raise TypeError(f"{what}: expected a subclass of {base and base.__name__}, got {shown(make)}")
    # `vars`: a subclass of a dataclass that is no dataclass inherits the parameters of its base. Drafters, never part of a policy, may be any class.
    params = vars(make).get("__dataclass_params__")
    if entry.kind != "drafter" and (params is None or not params.frozen):
        raise TypeError(
            f"{what}: {make.__name__} is no frozen dataclass, so its JSON form would lose its parameters: put @dataclass(frozen=True) above it"
        )
    fields = [f.name for f in dataclasses.fields(entry.make)]  # type: ignore[arg-type]
    taken = list(inspect.signature(make.__init__).parameters)[1:]
    if set(fields) != set(taken):
        raise TypeError(
            f"{what}: {make.__name__} takes {', '.join(taken) or 'nothing'}, and its fields are {', '.join(fields) or 'none'}: "
            "its JSON form is made of the fields, so each parameter must be one, and no more (without an __init__ of its own)"
        )
