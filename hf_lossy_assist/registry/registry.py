"""Register and look up names: one entry for each rule, stop, filter, drafter and method.

JSON, `lossy_policy="name"`, the command line, the catalogue, model cards and the tests are made from these entries. An entry stands in
the last lines of the file that defines what it names. Another package may register too, before it uses a name or, for the command line, by
an entry point of the group "hf_lossy_assist" that imports it.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ..validation import nearest
from .discovery import ENTRIES, import_builtin_entries, import_entries, is_initialising
from .entry import (
    KINDS,
    Entry,
    Guarantee,
    Kind,
    Method,
    T,
    check_class,
    check_fields,
    check_promise,
    check_recipe,
    check_taken,
)


_bases: dict[Kind, type] = {}


def set_base(kind: Kind, cls: type) -> None:
    """Set the base class of every class of a kind. The base calls this from its module, which is above this file in the layers."""
    _bases[kind] = cls


def register_rule(name: str, cls: T, *, guarantee: Guarantee, summary: str, neutral: Mapping[str, Any] | None = None,
                  paper: str = "", **more: Any) -> T:  # fmt: skip
    """Give an acceptance rule a name; returns the class. `more`: the other fields of `Entry`.

    Raises: `ValueError` or `TypeError`, one line, for a name that is taken and for an entry that contradicts itself.
    """
    return _register(Entry("rule", name, cls, guarantee, neutral, paper, summary, **more))


def register_stop(name: str, cls: T, *, summary: str, paper: str = "", **more: Any) -> T:
    """Give a draft stop a name; returns the class. Every setting is lossless: a stop says how much is drafted, not what is accepted."""
    return _register(Entry("stop", name, cls, "lossless", None, paper, summary, **more))


def register_filter(name: str, cls: T, *, guarantee: Guarantee = "lossless", summary: str,
                    neutral: Mapping[str, Any] | None = None, paper: str = "", **more: Any) -> T:  # fmt: skip
    """Give a verify filter a name; returns the class. As `register_rule`."""
    return _register(Entry("filter", name, cls, guarantee, neutral, paper, summary, **more))


def register_drafter(name: str, cls: T, *, summary: str, paper: str = "", **more: Any) -> T:
    """Give a drafter a name; returns the class. Every drafter is lossless: the target verifies what it proposes."""
    return _register(Entry("drafter", name, cls, "lossless", None, paper, summary, **more))


def register_method(name: str, *, recipe: T, guarantee: Guarantee, summary: str, neutral: Mapping[str, Any] | None = None,
                    paper: str = "", **more: Any) -> T:  # fmt: skip
    """Give a recipe a name; returns the recipe, a function that returns a `LossyPolicy`. `more`: the other fields of `Method`.

    Parameters of the recipe named "head", "profile" and "companion" are what `generate(…, lossy_policy="name", head=…)` hands on.
    """
    return _register(Method("method", name, recipe, guarantee, neutral, paper, summary, **more))


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
    found = find_entry("method", name, where)
    assert isinstance(found, Method)
    return found


def find_method_for_head(polarity: str, position: str) -> Method:
    """Return the first method whose heads say P(`polarity`) of states at `position`.

    Raises: `ValueError`, one line, where no method has such heads.
    """
    for found in list_entries("method"):
        kind = found.head_kind if isinstance(found, Method) else None
        if kind is not None and kind.polarity == polarity and kind.position in (position, None):
            return found  # type: ignore[return-value]
    raise ValueError(f"no method has heads that say P({polarity}) of states at the position {position!r}")


def find_name(kind: Kind, cls: type) -> str | None:
    """Return the name of a class, or None if it is not registered."""
    import_entries()
    return next((name for name, found in ENTRIES[kind].items() if found.make is cls), None)


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
        import_entries()
        return len(ENTRIES[self._kind])

    def __repr__(self) -> str:
        return f"<{self._kind}s: {', '.join(self)}>"


def _register(made: Entry) -> Any:
    if not is_initialising(made.make):
        import_builtin_entries()  # or else a name of a module that is not imported yet would look free
    _check(made)
    taken = ENTRIES[made.kind].get(made.name)
    if taken is not None:
        raise ValueError(
            f"register_{made.kind}: {made.name!r} is the name of {taken.make.__module__}.{taken.make.__qualname__} already: "
            f"choose another, or forget({made.kind!r}, {made.name!r}) first"
        )
    ENTRIES[made.kind][made.name] = made
    return made.make


def _check(made: Entry) -> None:
    """Refuse what could not be listed, written as JSON or read back."""
    what = f"register_{made.kind}: {made.name}"
    if made.kind == "method":
        check_recipe(what, made.make)
        return
    check_class(what, made.make, _bases.get(made.kind))
    assert inspect.isclass(made.make)
    if made.kind == "drafter":  # no policy holds one, so one without settings need be no dataclass of its own
        check_taken(what, made.make)
    else:
        check_fields(what, made.make)
        check_promise(what, made.make, made.guarantee)


S = TypeVar("S", bound="NoDeepCopy")


class NoDeepCopy:
    """Base of policies and their parts, which are frozen: a deep copy is the object itself, with the same companion and heads.

    Transformers deep-copies a generation config several times in every call, and a policy may stand in one. Pickling makes a new object.
    """

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
    parameters: dict[str, Any]  # name → default; `registry.REQUIRED` where there is none
    source: str
    summary: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build_catalog() -> list[CatalogEntry]:
    """Return the entries of all names: methods, rules, stops, filters, then drafters, each in the order of registration."""
    return [_describe_entry(find_entry) for kind in KINDS for find_entry in list_entries(kind)]


def _describe_entry(find_entry: Entry) -> CatalogEntry:
    return CatalogEntry(
        name=find_entry.name,
        kind=find_entry.kind,
        class_name=find_entry.make.__name__,
        guarantee=find_entry.guarantee_text,
        neutral=find_entry.neutral_in_words,
        parameters={name: _to_json(default) for name, default in find_entry.parameters.items()},
        source=find_entry.source,
        summary=find_entry.summary,
    )


def _to_json(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value
