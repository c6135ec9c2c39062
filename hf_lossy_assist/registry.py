"""Everything that has a name: one entry for each rule, stop, filter, drafter and method.

JSON, `lossy_policy="name"`, the command line, the catalogue, model cards and the tests are made from these entries. An entry stands beside
what it names: the last lines of the same file. A package of one's own may register too, before it uses a name or, for the command line, by
an entry point of the group "hf_lossy_assist" that imports it.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

from .entry_checks import LONGEST_NAME, check_class, check_fields, check_line, check_promise, check_recipe
from .validation import nearest, one_line, shown


Kind = Literal["method", "rule", "stop", "filter", "drafter"]
Guarantee = Literal["lossless", "lossy", "depends"]
Need = Literal["head", "profile", "companion"]
T = TypeVar("T", bound=Callable[..., Any])

KINDS: tuple[Kind, ...] = ("method", "rule", "stop", "filter", "drafter")
GUARANTEES: tuple[Guarantee, ...] = ("lossless", "lossy", "depends")
NEEDS: tuple[Need, ...] = ("head", "profile", "companion")
PLUGINS = "hf_lossy_assist"  # the group of entry points that register more
ROOMS = (
    "rules",
    "stops",
    "filters",
    "drafters",
    "policy.methods",
)  # every file of these is read for what it registers
REQUIRED = "required"
_ARXIV = re.compile(r"\d{4}\.\d{5}")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class HeadKind:
    """The heads that a method is made for: what their probability is of, and where the state stands that they read."""

    polarity: Literal["acceptable", "important"]
    position: Literal["predicting", "token"] | None = None  # None: either
    label: str = ""  # the label of the training data, as a formula or a sentence


@dataclass(frozen=True)
class Entry:
    """One name that a policy's JSON form, `lossy_policy=` or the command line may hold.

    Args:
        make: the class of a rule, stop, filter or drafter; the recipe of a method, a function that returns a `LossyPolicy`.
        guarantee: "lossless", "lossy", or "depends": then `condition` says on what.
        neutral: parameters, in JSON form, with which a rule is strict acceptance bit by bit, and a filter or a method lossless,
            whatever the other parameters are. None: there is nothing to set, every setting is lossless.
        neutral_text: the same for readers, where the parameters alone do not say it.
        beside: other parts of a policy, in JSON form, that the neutral setting needs.
        paper: an arXiv number, an address, or the name of an engine; "" for this package's own.
        summary: one sentence.
        example: a value, in JSON form, for each parameter without a default.
    """

    kind: Kind
    name: str
    make: Callable[..., Any]
    guarantee: Guarantee
    neutral: Mapping[str, Any] | None
    paper: str
    summary: str
    condition: str = ""
    neutral_text: str = ""
    beside: Mapping[str, Any] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        what = f"register_{self.kind}"
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"{what}: expected a name of a-z, 0-9 and _, got {shown(self.name)}")
        if len(self.name) > LONGEST_NAME:
            raise ValueError(f"{what}: expected a name of at most {LONGEST_NAME} characters, got {len(self.name)}")
        what = f"{what}: {self.name}"
        if not callable(self.make):
            raise TypeError(f"{what}: expected a class or a function, got {shown(self.make)}")
        for name in ("guarantee", "paper", "summary", "condition", "neutral_text"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{what}: {name}: expected a text, got {shown(getattr(self, name))}")
            check_line(f"{what}: {name}", getattr(self, name))
        for name in ("neutral", "beside", "example"):
            if not isinstance(getattr(self, name) or {}, Mapping):
                raise TypeError(f"{what}: {name}: expected a dict of parameters, got {shown(getattr(self, name))}")
        if self.guarantee not in GUARANTEES:
            raise ValueError(f"{what}: {nearest('guarantee', str(self.guarantee), GUARANTEES)}")
        if (self.guarantee == "depends") != bool(self.condition):
            raise ValueError(
                f"{what}: condition='…' says on what a guarantee depends: pass it with guarantee='depends'"
            )
        if self.guarantee == "lossy" and self.neutral is None:
            raise ValueError(
                f"{what}: a lossy {self.kind} needs a neutral setting, such as neutral={{'threshold': 0.0}}"
            )
        unknown = sorted(set(map(str, self.neutral or {})) - set(self.parameters))
        if unknown:
            raise ValueError(f"{what}: neutral: {nearest('parameter', unknown[0], self.parameters)}")
        if not self.summary.endswith("."):
            raise ValueError(f"{what}: expected a summary that ends with a full stop, got {shown(self.summary)}")

    @property
    def parameters(self) -> dict[str, Any]:
        """Each parameter's default; `REQUIRED` where it has none."""
        if dataclasses.is_dataclass(self.make):
            return {f.name: _default(f) for f in dataclasses.fields(self.make) if f.init}
        if inspect.isclass(self.make):  # a drafter: the engine makes it, not a user
            return {}
        given = inspect.signature(self.make).parameters.values()
        return {p.name: REQUIRED if p.default is p.empty else p.default for p in given}

    @property
    def required(self) -> list[str]:
        """The parameters without a default."""
        return [name for name, default in self.parameters.items() if default == REQUIRED]

    @property
    def source(self) -> str:
        """Where it comes from: the paper's address, an engine, or this package."""
        return f"huggingface.co/papers/{self.paper}" if _ARXIV.fullmatch(self.paper) else self.paper or "this package"

    @property
    def guarantee_text(self) -> str:
        return self.condition or self.guarantee

    @property
    def neutral_in_words(self) -> str:
        """The neutral setting, for readers."""
        if self.neutral_text:
            return self.neutral_text
        if self.neutral:
            return ", ".join(f"{name} = {value}" for name, value in self.neutral.items())
        return "every setting" if self.parameters else "itself"

    @property
    def neutral_spec(self) -> dict[str, Any]:
        """The JSON form of a policy with this rule, stop or filter at its neutral setting."""
        return {self.kind: {"name": self.name, **self.example, **(self.neutral or {})}, **self.beside}


@dataclass(frozen=True)
class Method(Entry):
    """A published method: a recipe, and what must stand beside its name.

    Args:
        needs: what the recipe cannot do without: "head", "profile", "companion"; each is a parameter of it.
        head_kind: of a method with a head.
        title: its name in a text.
    """

    needs: tuple[Need, ...] = ()
    head_kind: HeadKind | None = None
    title: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_line(f"register_method: {self.name}: title", self.title)
        for need in self.needs:
            if need not in NEEDS or need not in self.parameters:
                raise ValueError(
                    f"register_method: {self.name}: the recipe has no parameter {shown(need)}: see needs="
                )
        if ("head" in self.needs) != (self.head_kind is not None):
            raise ValueError(f"register_method: {self.name}: needs=('head',) and head_kind= belong together")


_entries: dict[Kind, dict[str, Entry]] = {kind: {} for kind in KINDS}
_bases: dict[Kind, type] = {}
_loaded: set[str] = set()
_reading = threading.local()  # .now: this thread is importing what registers


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
    _load_rooms()
    if (
        name not in _entries[kind]
    ):  # a plugin that cannot be imported is no reason to keep a name that stands in its way
        entry(kind, name)
    del _entries[kind][name]


def entries(kind: Kind) -> list[Entry]:
    """All entries of a kind, in the order in which they were registered."""
    _load()
    return list(_entries[kind].values())


def entry(kind: Kind, name: str, where: str = "") -> Entry:
    """The entry of a name. Raises: `ValueError`, one line with the nearest match, for a name that nobody registered."""
    _load()
    if name not in _entries[kind]:
        raise ValueError(f"{where}{nearest(kind, str(name), _entries[kind])}")
    return _entries[kind][name]


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
    _load()
    return next((name for name, its in _entries[kind].items() if its.make is cls), None)


class Names(Mapping[str, Any]):
    """A view of the registry: the classes, or recipes, of one kind by name."""

    def __init__(self, kind: Kind):
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        _load()
        return _entries[self._kind][name].make

    def __iter__(self) -> Iterator[str]:
        _load()
        return iter(_entries[self._kind])

    def __len__(self) -> int:
        _load()
        return len(_entries[self._kind])

    def __repr__(self) -> str:
        return f"<{self._kind}s: {', '.join(self)}>"


def _add(made: Entry) -> Any:
    if not _of_a_room_being_read(made.make):
        _load_rooms()  # or else the name of a room that nobody has read yet would look free
    _check(made)
    taken = _entries[made.kind].get(made.name)
    if taken is not None:
        raise ValueError(
            f"register_{made.kind}: {made.name!r} is the name of {taken.make.__module__}.{taken.make.__qualname__} already: "
            f"choose another, or forget({made.kind!r}, {made.name!r}) first"
        )
    _entries[made.kind][made.name] = made
    return made.make


def _check(made: Entry) -> None:
    """Refuse what could not be listed, written as JSON or read back."""
    what = f"register_{made.kind}: {made.name}"
    if made.kind == "method":
        check_recipe(what, made.make)
        return
    check_class(what, made.make, _bases.get(made.kind))
    assert inspect.isclass(made.make)
    if made.kind != "drafter":  # which no policy holds
        check_fields(what, made.make)
        check_promise(what, made.make, made.guarantee)


def _of_a_room_being_read(make: Any) -> bool:
    """Whether a file of this package registers it, in its last lines: to read all rooms then would be to read it within itself."""
    name = str(getattr(make, "__module__", ""))
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name.startswith(f"{__package__}.") and getattr(spec, "_initializing", False)


def _load() -> None:
    """Import what registers: this package's own rooms, and the entry points of others. Once, and when a name is first looked up:
    an entry stands above this file in the layers. What could not be imported is tried again at the next look-up.

    Raises: `ImportError`, one line, for an entry point that cannot be loaded.
    """
    _load_rooms()
    if PLUGINS in _loaded or getattr(_reading, "now", False):
        return
    for point in entry_points(group=PLUGINS):
        try:
            with _reading_on():
                point.load()
        except (Exception, SystemExit) as error:
            raise ImportError(
                f"the entry point {point.name} = {point.value} of the group {PLUGINS!r} cannot be loaded: "
                f"{type(error).__name__}: {one_line(error)}; mend its package, or uninstall that"
            ) from error
    _loaded.add(PLUGINS)


def _load_rooms() -> None:
    if getattr(_reading, "now", False):
        return
    for room in ROOMS:
        if room not in _loaded:
            with _reading_on():
                made = importlib.import_module(f"{__package__}.{room}")
                for file in pkgutil.iter_modules(getattr(made, "__path__", ())):
                    importlib.import_module(f"{made.__name__}.{file.name}")
            _loaded.add(room)


@contextmanager
def _reading_on() -> Iterator[None]:
    """Import in here. Where that fails, names go that came with a module which Python took back: it will register them once more."""
    before = {kind: set(names) for kind, names in _entries.items()}
    _reading.now = True
    try:
        yield
    except BaseException:
        for kind, names in _entries.items():
            for name in set(names) - before[kind]:
                if names[name].make.__module__ not in sys.modules:
                    del names[name]
        raise
    finally:
        _reading.now = False


def _default(parameter: "dataclasses.Field[Any]") -> Any:
    if parameter.default_factory is not dataclasses.MISSING:
        return parameter.default_factory()
    return REQUIRED if parameter.default is dataclasses.MISSING else parameter.default
