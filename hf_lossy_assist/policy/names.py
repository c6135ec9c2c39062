"""Policies by name: a rule, a stop or a filter alone, and what to write where a name is not enough."""

import difflib
import json
from collections.abc import Iterable
from typing import Any

from ..registry import Kind, Names, entry
from ..validation import shown
from .policy import LossyPolicy


SEAMS: tuple[Kind, ...] = ("rule", "stop", "filter")


def scalar(value: Any) -> bool:
    """Whether a parameter can stand in the short form of a policy, `top_k:k=4`."""
    return isinstance(value, bool | int | float)


def by_name(name: str, policies: Iterable[str]) -> LossyPolicy:
    """The policy whose only part beyond the neutral one is called `name`; `policies`: what else has a name.

    Raises: `ValueError`, one line, for a part that needs parameters, with its JSON form, and for an unknown name, with all there are.
    """
    for seam in SEAMS:
        if name not in Names(seam):
            continue
        found = entry(seam, name)
        if not found.required:
            return LossyPolicy(**{seam: found.make()})
        values = {what: found.example.get(what, "…") for what in found.required}
        form = json.dumps({seam: {"name": name} | values})
        if all(map(scalar, values.values())):
            form = f"{name}:{','.join(f'{what}={json.dumps(value)}' for what, value in values.items())}"
        raise ValueError(
            f"lossy_policy: {name} is a {seam} that needs {' and '.join(found.required)}: pass lossy_policy='{form}'"
        )
    groups = {"policies": sorted(policies)} | {f"{seam}s": sorted(Names(seam)) for seam in SEAMS}
    listed = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    close = difflib.get_close_matches(name, [n for names in groups.values() for n in names], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"lossy_policy: unknown policy {shown(name)}.{hint} There are {listed}")
