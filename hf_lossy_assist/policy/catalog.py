"""The registry as plain data, for `hf-lossy policies` and the docs: what each name does, what it guarantees, where it comes from."""

from dataclasses import asdict, dataclass
from typing import Any

from ..registry import KINDS, Entry, Kind, entries


@dataclass(frozen=True)
class Line:
    """One name that a policy's JSON form, or `lossy_policy=`, may hold."""

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


def catalog() -> list[Line]:
    """Every name: methods, rules, stops, filters, then drafters, each in the order of registration."""
    return [_line(entry) for kind in KINDS for entry in entries(kind)]


def _line(entry: Entry) -> Line:
    return Line(
        name=entry.name,
        kind=entry.kind,
        class_name=entry.make.__name__,
        guarantee=entry.guarantee_text,
        neutral=entry.neutral_in_words,
        parameters={name: _plain(default) for name, default in entry.parameters.items()},
        source=entry.source,
        summary=entry.summary,
    )


def _plain(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value
