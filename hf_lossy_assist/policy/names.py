"""Policies by name: a rule, a stop or a filter alone, and what to write where a name is not enough."""

import dataclasses
import difflib
import json
from collections.abc import Iterable
from typing import Any

from ..filters import FILTERS
from ..rules import RULES
from ..stops import STOPS
from ..validation import shown
from .policy import LossyPolicy


SEAMS: dict[str, dict[str, Any]] = {"rule": RULES, "stop": STOPS, "filter": FILTERS}
# A value that each parameter without a default may have, for the line that shows how to write it.
EXAMPLES: dict[str, Any] = {
    "k": 4, "alpha": 0.5, "weight": 0.5, "lenience": 0.5, "threshold": 0.1, "budget": 0.5, "rule": {"name": "top_k", "k": 4},
    "rules": ["typical", {"name": "top_k", "k": 4}], "table": [[1, 8], [8, 2]], "stop": "svip", "stops": ["svip", "constant"],
    "head": "folder or org/name", "profile": "folder or org/name", "companion": "folder or org/name",
}  # fmt: skip


def by_name(name: str, policies: Iterable[str]) -> LossyPolicy:
    """The policy whose only part beyond the neutral one is called `name`; `policies`: what else has a name.

    Raises: `ValueError`, one line, for a part that needs parameters, with its JSON form, and for an unknown name, with all there are.
    """
    for seam, known in SEAMS.items():
        if name not in known:
            continue
        needed = [f.name for f in dataclasses.fields(known[name]) if required(f)]
        if not needed:
            return LossyPolicy(**{seam: known[name]()})
        form = json.dumps({seam: {"name": name} | {parameter: EXAMPLES[parameter] for parameter in needed}})
        raise ValueError(
            f"lossy_policy: {name} is a {seam} that needs {' and '.join(needed)}: pass lossy_policy='{form}'"
        )
    groups = {"policies": sorted(policies)} | {f"{seam}s": sorted(known) for seam, known in SEAMS.items()}
    listed = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    close = difflib.get_close_matches(name, [n for names in groups.values() for n in names], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"lossy_policy: unknown policy {shown(name)}.{hint} There are {listed}")


def required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
