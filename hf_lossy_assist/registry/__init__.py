"""The registry of names: rules, stops, filters, drafters and methods.

JSON forms, `lossy_policy="name"`, the command line, the catalogue, model cards and tests are generated from the entries. Other packages
register before they use a name or, for the command line, in a module that is an entry point of the group "hf_lossy_assist".
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar, get_args

from ..validation import nearest, one_line, shown


Kind = Literal["method", "rule", "stop", "filter", "drafter"]
Guarantee = Literal["lossless", "lossy", "depends"]
T = TypeVar("T", bound=Callable[..., object])

KINDS: tuple[Kind, ...] = get_args(Kind)
NEEDS = ("head", "profile", "companion")
REQUIRED = "required"
PACKAGE = __name__.partition(".")[0]
PLUGINS = "hf_lossy_assist"  # entry point group of plugins
BUILTIN = ("rules", "stops", "filters", "drafters", "policy.recipes")  # all their modules are imported
# Names that were this package's, by the examples that register them now.
EXAMPLES = {
    "lossy_rules.py": ("cascade", "ensemble", "fly", "kl_judge", "mars", "synthetic_for_benchmarks"),
    "stateful_rules.py": ("csd", "regret_budget"),
    "baselines.py": ("adaedl", "mentored", "moving_average"),
}
LOADED: set[str] = set()  # rooms, and `PLUGINS`, whose modules are imported
_entries: dict[Kind, dict[str, "Entry"]] = {kind: {} for kind in KINDS}
_bases: dict[Kind, type] = {}
_importing = threading.local()  # .now: this thread is importing registering modules


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
        title: a method's display name. head_kind: the heads that a method requires.
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
    title: str = ""
    head_kind: HeadKind | None = None

    def __post_init__(self) -> None:
        what = f"register_{self.kind}: {self.name}"
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", self.name):
            raise ValueError(f"register_{self.kind}: expected a name of a-z, 0-9 and _, got {shown(self.name)}")
        if not self.summary:
            object.__setattr__(self, "summary", (inspect.getdoc(self.make) or "").partition("\n")[0])
        if self.kind != "method":
            self._check_class(what)
            lossless = getattr(self.make, "lossless", True)
            if not isinstance(lossless, bool) and not self.condition:
                raise ValueError(f"{what}: its lossless is a property: say by condition='…' on what it depends")
            guarantee = "depends" if self.condition else "lossless" if lossless else "lossy"
            object.__setattr__(self, "guarantee", guarantee)
        elif self.guarantee not in get_args(Guarantee):
            raise ValueError(f"{what}: {nearest('guarantee', str(self.guarantee), get_args(Guarantee))}")
        if self.guarantee == "lossy" and self.neutral is None:
            raise ValueError(f"{what}: a lossy {self.kind} needs a neutral setting: neutral={{'threshold': 0.0}}")
        if self.ladder is not None and not self.example and self.required == [self.ladder[0]]:
            name, values = self.ladder
            object.__setattr__(self, "example", {name: values[len(values) // 2]})

    def _check_class(self, what: str) -> None:
        """Refuse a class that could not be read back from its JSON form, which consists of its fields."""
        base, make = _bases.get(self.kind, object), self.make
        if not inspect.isclass(make) or not issubclass(make, base):
            raise TypeError(f"{what}: expected a subclass of {base.__name__}, got {shown(make)}")
        # `vars`: a subclass of a dataclass that is no dataclass inherits the parameters of its base. A drafter, never part of a policy,
        # may be any class.
        params: Any = vars(make).get("__dataclass_params__")
        if self.kind != "drafter" and (params is None or not params.frozen):
            raise TypeError(f"{what}: {make.__name__} is no frozen dataclass: put @dataclass(frozen=True) above it")
        names = [f.name for f in dataclasses.fields(make)] if dataclasses.is_dataclass(make) else []
        taken = list(self.signature.parameters)
        if set(names) != set(taken):
            raise TypeError(
                f"{what}: {make.__name__} takes {', '.join(taken) or 'nothing'}, and its fields are "
                f"{', '.join(names) or 'none'}: its JSON form is made of the fields, so each parameter must be one"
            )

    @cached_property
    def signature(self) -> inspect.Signature:
        """The parameters of `make`, read once."""
        return inspect.signature(self.make)

    @property
    def parameters(self) -> dict[str, object]:
        """Each parameter's default; `REQUIRED` if it has none."""
        parameters = self.signature.parameters.values()
        factories = {f.name: f.default_factory for f in getattr(self.make, "__dataclass_fields__", {}).values()}
        defaults = {p.name: REQUIRED if p.default is p.empty else p.default for p in parameters}
        values = {name: make() for name in defaults if callable(make := factories.get(name))}
        return defaults | values

    @property
    def required(self) -> list[str]:
        """The parameters without a default."""
        return [name for name, default in self.parameters.items() if default == REQUIRED]

    @property
    def needs(self) -> list[str]:
        """The parameters without a default among head, profile and companion."""
        return [name for name in self.required if name in NEEDS]

    @property
    def source(self) -> str:
        """The source: a paper's address, an engine, or the package that registered it."""
        if re.fullmatch(r"\d{4}\.\d{5}", self.paper):
            return f"huggingface.co/papers/{self.paper}"
        package = self.make.__module__.partition(".")[0]
        return self.paper or ("this package" if package == PACKAGE else package)

    def describe(self) -> dict[str, Any]:
        """Return the catalogue's facts as JSON values, for `hf-lossy policies` and the docs."""
        settings = ", ".join(f"{name} = {value}" for name, value in (self.neutral or {}).items())
        neutral = self.neutral_text or settings.replace("-inf", "−∞").replace("inf", "∞")
        return {
            "name": self.name,
            "kind": self.kind,
            "class_name": self.make.__name__,
            "guarantee": self.condition or self.guarantee,
            "neutral": neutral or ("every setting" if self.parameters else "itself"),
            "parameters": {name: _to_json(value) for name, value in self.parameters.items()},
            "source": self.source,
            "summary": self.summary,
        }


def _to_json(value: object) -> object:
    """Return a parameter's default, as text where JSON lacks it, as infinity or an object."""
    lacking = value in (float("inf"), float("-inf")) or dataclasses.is_dataclass(value)
    return str(value) if lacking else value


def set_base(kind: Kind, cls: type) -> None:
    """Set the base class of a kind. The base's module calls this, since it is above this one in the import layers."""
    _bases[kind] = cls


def register(entry: Entry) -> Any:
    """Register an entry and return its class or recipe; one of the same module and name is replaced.

    Raises: `ValueError`, one line, for a name that is taken.
    """
    make = entry.make
    if make.__module__.partition(".")[0] != PACKAGE:
        import_entries(plugins=False)  # otherwise names of modules that are not imported yet would look free
    taken = _entries[entry.kind].get(entry.name)
    if taken is not None and (taken.make.__module__, taken.make.__qualname__) != (make.__module__, make.__qualname__):
        raise ValueError(
            f"register_{entry.kind}: {entry.name!r} is the name of {taken.make.__module__}.{taken.make.__qualname__} already: "
            f"choose another, or forget({entry.kind!r}, {entry.name!r}) first"
        )
    _entries[entry.kind][entry.name] = entry
    return make


def register_class(name: str, cls: type, **entry: Any) -> None:
    """Register a class as what its base class is."""
    kind = next(kind for kind, base in _bases.items() if issubclass(cls, base))
    register(Entry(kind, name, cls, **entry))


def register_rule(name: str, cls: T, **entry: Any) -> T:
    """Register an acceptance rule and return its class. `entry`: other fields of `Entry`, such as `neutral`.

    Raises: `ValueError` or `TypeError`, one line, for a name that is taken and for an inconsistent entry.
    """
    return register(Entry("rule", name, cls, **entry))


def register_stop(name: str, cls: T, **entry: Any) -> T:
    """Register a draft stop, as `register_rule` does a rule. It decides how much is drafted, not what is accepted: it is lossless."""
    return register(Entry("stop", name, cls, **entry))


def register_filter(name: str, cls: T, **entry: Any) -> T:
    """Register a verify filter, as `register_rule` does a rule."""
    return register(Entry("filter", name, cls, **entry))


def register_drafter(name: str, cls: T, **entry: Any) -> T:
    """Register a drafter, as `register_rule` does a rule. It is lossless, since the target verifies its proposals."""
    return register(Entry("drafter", name, cls, **entry))


def register_method(name: str, *, recipe: T, guarantee: Guarantee, **entry: Any) -> T:
    """Register a recipe, a function that returns a `LossyPolicy`, and return it. `entry`: other fields of `Entry`.

    `generate(…, lossy_policy="name", head=…)` passes "head", "profile" and "companion" to parameters of these names.
    """
    return register(Entry("method", name, recipe, guarantee, **entry))


def forget(kind: Kind, name: str) -> None:
    """Unregister a name. Raises: `ValueError` for an unregistered name."""
    if kind not in KINDS:
        raise ValueError(f"forget: {nearest('kind', str(kind), KINDS)}")
    import_entries(plugins=False)  # one that fails to import must not block the name
    if name not in _entries[kind]:
        find_entry(kind, name)
    del _entries[kind][name]


def import_entries(plugins: bool = True) -> None:
    """Import the registering modules of this package and of entry points once; a failed import is retried.

    Raises: `ImportError`, one line, for a failing entry point.
    """
    if getattr(_importing, "now", False):
        return
    _importing.now = True
    try:
        for room in BUILTIN:
            if room not in LOADED:
                module = importlib.import_module(f"{PACKAGE}.{room}")
                for file in pkgutil.iter_modules(getattr(module, "__path__", ())):
                    importlib.import_module(f"{module.__name__}.{file.name}")
                LOADED.add(room)
        if plugins and PLUGINS not in LOADED:
            for point in entry_points(group=PLUGINS):
                try:
                    point.load()
                except (Exception, SystemExit) as error:
                    raise ImportError(
                        f"the entry point {point.name} = {point.value} of the group {PLUGINS!r} cannot be loaded: "
                        f"{type(error).__name__}: {one_line(error)}; mend its package, or uninstall that"
                    ) from error
            LOADED.add(PLUGINS)
    finally:
        _importing.now = False


def list_entries(*kinds: Kind) -> list[Entry]:
    """Return all entries of these kinds, by default of all, in order of registration."""
    import_entries()
    return [entry for kind in kinds or KINDS for entry in _entries[kind].values()]


def find_entry(kind: Kind, name: str, where: str = "") -> Entry:
    """Return the entry of a name. Raises: `ValueError`, one line with the nearest match, for an unregistered name."""
    import_entries()
    if name not in _entries[kind]:
        raise ValueError(where + (find_example(name) or nearest(kind, str(name), _entries[kind])))
    return _entries[kind][name]


def find_example(name: str) -> str | None:
    """Return the error for a name that an example registers."""
    file = next((file for file, names in EXAMPLES.items() if name in names), None)
    return file and f"{name} is of examples/reproduce/{file} now: import that file first, which registers it"


def find_method_for_head(polarity: str, position: str) -> Entry:
    """Return the first method whose heads compute P(`polarity`) from states at `position`."""
    kinds = ((entry, entry.head_kind) for entry in list_entries("method"))
    return next(e for e, kind in kinds if kind and kind.polarity == polarity and kind.position in (position, None))


class Names(Mapping[str, Any]):
    """A view of the registry: classes or recipes of one kind by name."""

    def __init__(self, kind: Kind):
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        import_entries()
        return _entries[self._kind][name].make

    def __iter__(self) -> Iterator[str]:
        import_entries()
        return iter(_entries[self._kind])

    def __len__(self) -> int:
        return len(list_entries(self._kind))

    def __repr__(self) -> str:
        return f"<{self._kind}s: {', '.join(self)}>"
