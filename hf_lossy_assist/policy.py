"""`LossyPolicy`: a rule, a stop and a filter in one frozen, JSON-able bundle, and what `lossy_policy=` may be."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import nearest
from .filters import FILTERS, VerifyAll, VerifyFilter
from .rules import RULES, AcceptanceRule, Strict
from .stops import STOPS, SVIP, DraftStop


@dataclass(frozen=True)
class LossyPolicy:
    """What a round does beyond lossless speculative decoding: nothing, unless you say so.

    Args:
        rule (`AcceptanceRule`): which drafted tokens to accept; neutral: `Strict()`.
        stop (`DraftStop`, *optional*): when a row has drafted enough. None leaves it to the call's `num_assistant_tokens`,
            `num_assistant_tokens_schedule` and `assistant_confidence_threshold`, then to the same settings of the draft's
            generation config, and in the end to 5 tokens a round.
        filter (`VerifyFilter`): how many drafted tokens of each row go to the target; neutral: `VerifyAll()`.

    The JSON form is `{"rule": …, "stop": …, "filter": …}`; each entry is a name or `{"name": …, parameter: value, …}`,
    and a neutral entry is left out.
    """

    rule: AcceptanceRule = field(default_factory=Strict)
    stop: DraftStop | None = None
    filter: VerifyFilter = field(default_factory=VerifyAll)

    def __post_init__(self) -> None:
        for seam, base, optional in (
            ("rule", AcceptanceRule, False),
            ("stop", DraftStop, True),
            ("filter", VerifyFilter, False),
        ):
            value = getattr(self, seam)
            if not (isinstance(value, base) or (optional and value is None)):
                raise TypeError(f"LossyPolicy.{seam}: expected an object of {base.__name__}, got {value!r}")

    @property
    def lossless(self) -> bool:
        """True when the output has exactly the target's law (and greedy output is the target's own)."""
        return self.rule.lossless and self.filter.lossless

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `from_dict` reads it back to an equal policy."""
        out = {}
        for seam, known, neutral in (
            ("rule", RULES, Strict()),
            ("stop", STOPS, None),
            ("filter", FILTERS, VerifyAll()),
        ):
            value = getattr(self, seam)
            if value != neutral:
                out[seam] = {"name": _name_of(value, known)} | dataclasses.asdict(value)
        return out

    @classmethod
    def from_dict(cls, spec: Mapping[str, Any]) -> "LossyPolicy":
        """Read the JSON form. Unknown entries, names and parameters are refused, with the nearest match."""
        seams: dict[str, Mapping[str, type]] = {"rule": RULES, "stop": STOPS, "filter": FILTERS}
        for key in spec:
            if key not in seams:
                raise ValueError(f"lossy_policy: {nearest('entry', str(key), seams)}")
        return cls(
            **{seam: _build(seam, spec[seam], known) for seam, known in seams.items() if spec.get(seam) is not None}
        )

    def __str__(self) -> str:
        try:
            return json.dumps(self.to_dict()) if self.to_dict() else "strict"
        except ValueError:  # a rule, stop or filter of the user's own, without a name
            return repr(self)


POLICIES: dict[str, LossyPolicy] = {
    "strict": LossyPolicy(),
    "svip": LossyPolicy(stop=SVIP()),
}


def as_policy(given: Any) -> LossyPolicy:
    """What `lossy_policy=` accepts: a `LossyPolicy`, a rule, a stop or a filter alone, a name, the JSON form as a dict or as
    text, or the path of a JSON file.

    Raises: `TypeError` or `ValueError`, one line with what was given and what there is.
    """
    if isinstance(given, LossyPolicy):
        return given
    if isinstance(given, AcceptanceRule):
        return LossyPolicy(rule=given)
    if isinstance(given, DraftStop):
        return LossyPolicy(stop=given)
    if isinstance(given, VerifyFilter):
        return LossyPolicy(filter=given)
    if isinstance(given, Mapping):
        return LossyPolicy.from_dict(given)
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".json")):
        path = Path(given)
        if not path.is_file():
            raise ValueError(f"lossy_policy: there is no file {str(path)!r}")
        return _parse(path.read_text(encoding="utf-8"), f"the file {str(path)!r}")
    if isinstance(given, str):
        if given.lstrip().startswith("{"):
            return _parse(given, "the text")
        if given in POLICIES:
            return POLICIES[given]
        raise ValueError(f"lossy_policy: {nearest('policy', given, POLICIES)}")
    if isinstance(given, type):
        raise TypeError(f"lossy_policy: got the class {given.__name__}; pass an object of it, {given.__name__}()")
    raise TypeError(
        f"lossy_policy: expected a LossyPolicy, a rule, a stop, a name, a dict or a JSON file, got {type(given).__name__}"
    )


def _parse(text: str, where: str) -> LossyPolicy:
    try:
        spec = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"lossy_policy: {where} is not JSON: {error}") from None
    if not isinstance(spec, dict):
        raise ValueError(f'lossy_policy: {where} holds {spec!r}; expected an object such as {{"stop": "svip"}}')
    return LossyPolicy.from_dict(spec)


def _build(seam: str, spec: Any, known: Mapping[str, type]) -> Any:
    if isinstance(spec, tuple(known.values())):
        return spec
    parameters = {"name": spec} if isinstance(spec, str) else spec
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("name"), str):
        raise ValueError(f'lossy_policy: {seam}: expected a name or {{"name": …}}, got {spec!r}')
    parameters = dict(parameters)
    name = parameters.pop("name")
    if name not in known:
        raise ValueError(f"lossy_policy: {nearest(seam, name, known)}")
    fields = {f.name for f in dataclasses.fields(known[name])}
    for parameter in parameters:
        if parameter not in fields:
            raise ValueError(f"lossy_policy: {nearest(f'parameter of {seam} {name!r}', str(parameter), fields)}")
    return known[name](**parameters)


def _name_of(value: Any, known: Mapping[str, type]) -> str:
    for name, cls in known.items():
        if type(value) is cls:
            return name
    raise ValueError(f"{type(value).__name__} has no name: add it to the dict of its file to give it a JSON form")
