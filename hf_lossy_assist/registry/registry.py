"""Register and look up names of rules, stops, filters, drafters and methods.

JSON forms, `lossy_policy="name"`, the command line, the catalogue, model cards and tests are generated from the entries. Other packages
register before they use a name or, for the command line, in a module that is an entry point of the group "hf_lossy_assist".
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ..validation import nearest
from .discovery import ENTRIES, KINDS, Kind, import_builtin_entries, import_entries, is_initialising
from .entry import Entry, Guarantee, Method, check_make


T = TypeVar("T", bound=Callable[..., object])
_bases: dict[Kind, type] = {}
# Names that were this package's, by the examples that register them now.
EXAMPLES = {
    "examples/reproduce/lossy_rules.py": (
        "cascade",
        "ensemble",
        "fly",
        "kl_judge",
        "mars",
        "synthetic_for_benchmarks",
    ),
    "examples/reproduce/stateful_rules.py": ("csd", "regret_budget"),
    "examples/reproduce/baselines.py": ("adaedl", "mentored", "moving_average"),
}


def set_base(kind: Kind, cls: type) -> None:
    """Set the base class of a kind. The base's module calls this, since it is above this one in the import layers."""
    _bases[kind] = cls


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


def register_class(name: str, cls: type, **entry: Any) -> None:
    """Register a class as what its base class is."""
    kind = next(kind for kind, base in _bases.items() if issubclass(cls, base))
    register(Entry(kind, name, cls, **entry))


def register_method(name: str, *, recipe: T, guarantee: Guarantee, summary: str = "", **more: Any) -> T:
    """Register a recipe, a function that returns a `LossyPolicy`, and return it. `more`: other fields of `Method`.

    `generate(…, lossy_policy="name", head=…)` passes "head", "profile" and "companion" to parameters of these names.
    """
    return register(Method("method", name, recipe, guarantee, summary, **more))


def register(entry: Entry) -> Any:
    """Register an entry and return its class or recipe."""
    if not is_initialising(entry.make):
        import_builtin_entries()  # otherwise names of modules that are not imported yet would look free
    check_make(f"register_{entry.kind}: {entry.name}", entry, _bases.get(entry.kind))
    taken = ENTRIES[entry.kind].get(entry.name)
    if taken is not None:
        raise ValueError(
            f"register_{entry.kind}: {entry.name!r} is the name of {taken.make.__module__}.{taken.make.__qualname__} already: "
            f"choose another, or forget({entry.kind!r}, {entry.name!r}) first"
        )
    ENTRIES[entry.kind][entry.name] = entry
    return entry.make


def forget(kind: Kind, name: str) -> None:
    """Unregister a name, for notebook cells that run again. Raises: `ValueError` for an unregistered name."""
    if kind not in KINDS:
        raise ValueError(f"forget: {nearest('kind', str(kind), KINDS)}")
    import_builtin_entries()
    if name not in ENTRIES[kind]:  # without plugins: one that fails to import must not block the name
        find_entry(kind, name)
    del ENTRIES[kind][name]


def list_entries(kind: Kind) -> list[Entry]:
    """Return all entries of a kind in order of registration."""
    import_entries()
    return list(ENTRIES[kind].values())


def find_entry(kind: Kind, name: str, where: str = "") -> Entry:
    """Return the entry of a name. Raises: `ValueError`, one line with the nearest match, for an unregistered name."""
    import_entries()
    if name not in ENTRIES[kind]:
        raise ValueError(where + (find_example(name) or nearest(kind, str(name), ENTRIES[kind])))
    return ENTRIES[kind][name]


def find_example(name: str) -> str | None:
    """Return the error for a name that an example registers."""
    file = next((file for file, names in EXAMPLES.items() if name in names), None)
    return None if file is None else f"{name} is of {file} now: import that file first, which registers it"


def find_method(name: str, where: str = "") -> Method:
    """Return the entry of a method; see `find_entry`."""
    entry = find_entry("method", name, where)
    assert isinstance(entry, Method)
    return entry


def find_method_for_head(polarity: str, position: str) -> Method:
    """Return the first method whose heads compute P(`polarity`) from states at `position`.

    Raises: `ValueError`, one line, if there is none.
    """
    for entry in list_entries("method"):
        kind = entry.head_kind if isinstance(entry, Method) else None
        if kind is not None and kind.polarity == polarity and kind.position in (position, None):
            return entry  # type: ignore[return-value]
    raise ValueError(f"no method has heads that say P({polarity}) of states at the position {position!r}")


def find_name(kind: Kind, cls: type) -> str | None:
    """Return the name of a class, or None if it is not registered."""
    return next((entry.name for entry in list_entries(kind) if entry.make is cls), None)


class Names(Mapping[str, Any]):
    """A view of the registry: classes or recipes of one kind by name."""

    def __init__(self, kind: Kind):
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        import_entries()
        return ENTRIES[self._kind][name].make

    def __iter__(self) -> Iterator[str]:
        import_entries()
        return iter(ENTRIES[self._kind])

    def __len__(self) -> int:
        return len(list_entries(self._kind))

    def __repr__(self) -> str:
        return f"<{self._kind}s: {', '.join(self)}>"


@dataclass(frozen=True)
class CatalogEntry:
    """A registered name as plain data, for `hf-lossy policies` and the docs."""

    name: str
    kind: Kind
    class_name: str  # for a method: the recipe's name
    guarantee: str
    neutral: str  # the setting that is bit-equal to strict acceptance
    parameters: dict[str, object]  # name → default; `REQUIRED` if there is none
    source: str
    summary: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def build_catalog() -> list[CatalogEntry]:
    """Return the catalogue: methods, rules, stops, filters, then drafters, each in order of registration."""
    return [
        CatalogEntry(
            e.name, kind, e.make.__name__, e.condition or e.guarantee, e.neutral_in_words,
            # JSON has no infinity.
            {name: str(value) if value in (float("inf"), float("-inf")) else value for name, value in e.parameters.items()},
            e.source, e.summary,
        )
        for kind in KINDS for e in list_entries(kind)
    ]  # fmt: skip
