"""Everything that has a name: one entry for each rule, stop, filter, drafter and method.

JSON, `lossy_policy="name"`, the command line, the catalogue, model cards and the tests are made from these entries. An entry stands beside
what it names: the last lines of the same file. A package of one's own may register too, before it uses a name or, for the command line, by
an entry point of the group "hf_lossy_assist" that imports it.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from ..validation import nearest
from .checks import check_class, check_fields, check_promise, check_recipe, check_taken
from .entry import KINDS, Entry, Guarantee, Kind, Method, T
from .reading import ENTRIES, load, load_rooms, of_a_room_being_read


_bases: dict[Kind, type] = {}


def set_base(kind: Kind, cls: type) -> None:
    """Say what every class of a kind derives from. A room says it of its own base, which stands above this file in the layers."""
    _bases[kind] = cls


def register_rule(name: str, cls: T, *, guarantee: Guarantee, summary: str, neutral: Mapping[str, Any] | None = None,
                  paper: str = "", **more: Any) -> T:  # fmt: skip
    """Give an acceptance rule a name; returns the class. `more`: the other fields of `Entry`.

    Raises: `ValueError` or `TypeError`, one line, for a name that is taken and for an entry that contradicts itself.
    """
    return _add(Entry("rule", name, cls, guarantee, neutral, paper, summary, **more))


def register_stop(name: str, cls: T, *, summary: str, paper: str = "", **more: Any) -> T:
    """Give a draft stop a name; returns the class. Every setting is lossless: a stop says how much is drafted, not what is accepted."""
    return _add(Entry("stop", name, cls, "lossless", None, paper, summary, **more))


def register_filter(name: str, cls: T, *, guarantee: Guarantee = "lossless", summary: str,
                    neutral: Mapping[str, Any] | None = None, paper: str = "", **more: Any) -> T:  # fmt: skip
    """Give a verify filter a name; returns the class. As `register_rule`."""
    return _add(Entry("filter", name, cls, guarantee, neutral, paper, summary, **more))


def register_drafter(name: str, cls: T, *, summary: str, paper: str = "", **more: Any) -> T:
    """Give a drafter a name; returns the class. Every drafter is lossless: the target verifies what it proposes."""
    return _add(Entry("drafter", name, cls, "lossless", None, paper, summary, **more))


def register_method(name: str, *, recipe: T, guarantee: Guarantee, summary: str, neutral: Mapping[str, Any] | None = None,
                    paper: str = "", **more: Any) -> T:  # fmt: skip
    """Give a recipe a name; returns the recipe, a function that returns a `LossyPolicy`. `more`: the other fields of `Method`.

    Parameters of the recipe named "head", "profile" and "companion" are what `generate(…, lossy_policy="name", head=…)` hands on.
    """
    return _add(Method("method", name, recipe, guarantee, neutral, paper, summary, **more))


def forget(kind: Kind, name: str) -> None:
    """Take a name back, for a cell of a notebook that is run again. Raises: `ValueError` for a name that nobody registered."""
    if kind not in KINDS:
        raise ValueError(f"forget: {nearest('kind', str(kind), KINDS)}")
    load_rooms()
    if (
        name not in ENTRIES[kind]
    ):  # a plugin that cannot be imported is no reason to keep a name that stands in its way
        entry(kind, name)
    del ENTRIES[kind][name]


def entries(kind: Kind) -> list[Entry]:
    """All entries of a kind, in the order in which they were registered."""
    load()
    return list(ENTRIES[kind].values())


def entry(kind: Kind, name: str, where: str = "") -> Entry:
    """The entry of a name. Raises: `ValueError`, one line with the nearest match, for a name that nobody registered."""
    load()
    if name not in ENTRIES[kind]:
        raise ValueError(f"{where}{nearest(kind, str(name), ENTRIES[kind])}")
    return ENTRIES[kind][name]


def method(name: str, where: str = "") -> Method:
    """The entry of a method; as `entry`."""
    found = entry("method", name, where)
    assert isinstance(found, Method)
    return found


def method_of_head(polarity: str, position: str) -> Method:
    """The first method whose heads say P(`polarity`) of states at `position`.

    Raises: `ValueError`, one line, where no method has such heads.
    """
    for found in entries("method"):
        kind = found.head_kind if isinstance(found, Method) else None
        if kind is not None and kind.polarity == polarity and kind.position in (position, None):
            return found  # type: ignore[return-value]
    raise ValueError(f"no method has heads that say P({polarity}) of states at the position {position!r}")


def name_of(kind: Kind, cls: type) -> str | None:
    """The name of a class; None: nobody registered it."""
    load()
    return next((name for name, its in ENTRIES[kind].items() if its.make is cls), None)


class Names(Mapping[str, Any]):
    """A view of the registry: the classes, or recipes, of one kind by name."""

    def __init__(self, kind: Kind):
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        load()
        return ENTRIES[self._kind][name].make

    def __iter__(self) -> Iterator[str]:
        load()
        return iter(ENTRIES[self._kind])

    def __len__(self) -> int:
        load()
        return len(ENTRIES[self._kind])

    def __repr__(self) -> str:
        return f"<{self._kind}s: {', '.join(self)}>"


def _add(made: Entry) -> Any:
    if not of_a_room_being_read(made.make):
        load_rooms()  # or else the name of a room that nobody has read yet would look free
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
