"""Register and look up names: one entry for each rule, stop, filter, drafter and method.

JSON, `lossy_policy="name"`, the command line, the catalogue, model cards and the tests are made from these entries. Another package may
register too, before it uses a name or, for the command line, by an entry point of the group "hf_lossy_assist" that imports it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from typing_extensions import Self

from ..validation import nearest
from .discovery import ENTRIES, KINDS, Kind, import_builtin_entries, import_entries, is_initialising
from .entry import Entry, Guarantee, Method, check_make


T = TypeVar("T", bound=Callable[..., object])
S = TypeVar("S", bound="Frozen")
_bases: dict[Kind, type] = {}


def set_base(kind: Kind, cls: type) -> None:
    """Set the base class of every class of a kind. The base calls this from its module, which is above this file in the layers."""
    _bases[kind] = cls


def register_rule(name: str, cls: T, *, guarantee: Guarantee, summary: str = "", **more: Any) -> T:
    """Give an acceptance rule a name; returns the class. `more`: other fields of `Entry`, such as `neutral`.

    Raises: `ValueError` or `TypeError`, one line, for a name that is taken and for an entry that contradicts itself.
    """
    return _register(Entry("rule", name, cls, guarantee, summary, **more))


def register_stop(name: str, cls: T, *, summary: str = "", **more: Any) -> T:
    """Give a draft stop a name; returns the class. Every setting is lossless: a stop says how much is drafted, not what is accepted."""
    return _register(Entry("stop", name, cls, "lossless", summary, **more))


def register_filter(name: str, cls: T, *, guarantee: Guarantee = "lossless", summary: str = "", **more: Any) -> T:
    """Give a verify filter a name; returns the class. Arguments and errors as of `register_rule`."""
    return _register(Entry("filter", name, cls, guarantee, summary, **more))


def register_drafter(name: str, cls: T, *, summary: str = "", **more: Any) -> T:
    """Give a drafter a name; returns the class. Every drafter is lossless: the target verifies what it proposes."""
    return _register(Entry("drafter", name, cls, "lossless", summary, **more))


def register_method(name: str, *, recipe: T, guarantee: Guarantee, summary: str = "", **more: Any) -> T:
    """Give a recipe a name; returns the recipe, a function that returns a `LossyPolicy`. `more`: the other fields of `Method`.

    Parameters of the recipe named "head", "profile" and "companion" are what `generate(…, lossy_policy="name", head=…)` hands on.
    """
    return _register(Method("method", name, recipe, guarantee, summary, **more))


def _register(entry: Entry) -> Any:
    if not is_initialising(entry.make):
        import_builtin_entries()  # or else a name of a module that is not imported yet would look free
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
    """Take a name back, for a cell of a notebook that is run again. Raises: `ValueError` for a name that nobody registered."""
    if kind not in KINDS:
        raise ValueError(f"forget: {nearest('kind', str(kind), KINDS)}")
    import_builtin_entries()
    if name not in ENTRIES[kind]:  # a plugin that cannot be imported must not keep a name taken
        find_entry(kind, name)
    del ENTRIES[kind][name]


def list_entries(kind: Kind) -> list[Entry]:
    """Return all entries of a kind, in the order in which they were registered."""
    import_entries()
    return list(ENTRIES[kind].values())


def find_entry(kind: Kind, name: str, where: str = "") -> Entry:
    """Return the entry of a name. Raises: `ValueError`, one line with the nearest match, for a name that nobody registered."""
    import_entries()
    if name not in ENTRIES[kind]:
        raise ValueError(f"{where}{nearest(kind, str(name), ENTRIES[kind])}")
    return ENTRIES[kind][name]


def find_method(name: str, where: str = "") -> Method:
    """Return the entry of a method, as `find_entry` does."""
    entry = find_entry("method", name, where)
    assert isinstance(entry, Method)
    return entry


def find_method_for_head(polarity: str, position: str) -> Method:
    """Return the first method whose heads compute P(`polarity`) from states at `position`.

    Raises: `ValueError`, one line, where no method has such heads.
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
    """A view of the registry: the classes, or recipes, of one kind by name."""

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


class Frozen:
    """Base of policies and their parts, which are frozen: a deep copy is the object itself, with the same companion and heads.

    Transformers deep-copies a generation config several times in every call, and a policy may stand in one. Pickling makes a new object.
    A parameter that the class lacks is refused with those that it has.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        known = inspect.signature(cls).parameters
        unknown = next((name for name in kwargs if name not in known), None)
        if unknown is not None and all(each.kind is not each.VAR_KEYWORD for each in known.values()):
            raise TypeError(nearest(f"parameter of {cls.__name__}", unknown, known))
        return super().__new__(cls)

    def __deepcopy__(self: S, memo: dict[int, object]) -> S:
        return self


@dataclass(frozen=True)
class CatalogEntry:
    """One name of the registry as plain data, for `hf-lossy policies` and the docs."""

    name: str
    kind: Kind
    class_name: str  # of a method: its recipe's
    guarantee: str
    neutral: str  # the setting at which the output is strict acceptance's, bit by bit
    parameters: dict[str, object]  # name → default; `REQUIRED` where there is none
    source: str
    summary: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def build_catalog() -> list[CatalogEntry]:
    """Return the entries of all names: methods, rules, stops, filters, then drafters, each in the order of registration."""
    return [
        CatalogEntry(
            e.name, kind, e.make.__name__, e.condition or e.guarantee, e.neutral_in_words,
            # JSON has no infinity.
            {name: str(value) if value in (float("inf"), float("-inf")) else value for name, value in e.parameters.items()},
            e.source, e.summary,
        )
        for kind in KINDS for e in list_entries(kind)
    ]  # fmt: skip
