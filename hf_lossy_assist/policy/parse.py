"""Make a `LossyPolicy` of everything that `lossy_policy=` accepts: policies, parts, names, JSON, files and folders."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artifacts.head import Head
from ..artifacts.safe_references import load_parts
from ..registry import NEEDS, Names, find_method, list_entries
from ..validation import shown
from .policy import LossyPolicy, make_head_policy, parse_policy, run_recipe
from .serialise import PARTS, SAVED, read_spec
from .short_form import SEAMS, is_short_form, make_part_policy, parse_short_form


# What each need may be, in words.
MAY_BE = {
    "head": "a Head, a folder or org/name",
    "profile": "a Profile, a folder or org/name",
    "companion": "a model, a folder or org/name",
}


def as_policy(given: Any, *, head: Any = None, profile: Any = None, companion: Any = None) -> LossyPolicy:
    """Make a policy of what `lossy_policy=` accepts: a `LossyPolicy`, a rule, a stop or a filter alone, a trained head, a name (of a method,
    or of a rule, stop or filter that needs no parameter), the short form `top_k:k=4+svip`, the JSON form as a dict or as text, the path of a JSON file or of a
    folder that `save_pretrained` wrote. A name is never a folder: one that is called like it is written ./strict. A file, like a folder, names heads by its own sub-folders or by repositories on the Hub
    alone; a dict or a text may name any folder.

    Args:
        head (`Head` or `str`): beside the name of a method that needs one; a text is a folder or a name on the Hub.
        profile (`Profile` or `str`): the same. companion (`PreTrainedModel` or `str`): the same.

    Raises: `TypeError` or `ValueError`, one line with what was given and what there is.
    """
    beside: dict[str, Any] = {
        name: value for name, value in zip(NEEDS, (head, profile, companion), strict=True) if value is not None
    }
    if isinstance(given, str) and given in Names("method"):
        return make_named_policy(given, beside)
    if beside:
        name = next(iter(beside))
        takers = " or ".join(f'lossy_policy="{m.name}"' for m in list_entries("method") if name in m.parameters)
        raise ValueError(f"{name}=… is for {takers}, not for lossy_policy={shown(given)}: leave it out")
    if isinstance(given, LossyPolicy):
        return given
    for kind, base in PARTS.items():
        if isinstance(given, base):
            parts: dict[str, Any] = {kind: given}
            return LossyPolicy(**parts)
    if isinstance(given, Mapping):
        return LossyPolicy.from_dict(given)
    if isinstance(given, Head):
        return make_head_policy(given)
    if isinstance(given, str | Path):
        return _parse_text(given)
    if isinstance(given, type):
        raise TypeError(f"lossy_policy: got the class {given.__name__}; pass an object of it, {given.__name__}(…)")
    if any(given is m.make for m in list_entries("method")):
        raise TypeError(f"lossy_policy: got the function {given.__name__}; pass what it returns, {given.__name__}(…)")
    raise TypeError(
        f"lossy_policy: expected a LossyPolicy, a rule, a stop, a name, a dict or a JSON file, got {type(given).__name__}"
    )


def make_named_policy(name: str, beside: Mapping[str, Any], **settings: Any) -> LossyPolicy:
    """Return the policy of a method, given the parts that it requires.

    Args:
        beside: "head", "profile", "companion": objects, folders or names on the Hub.
        settings: other parameters of its recipe.

    Raises: `ValueError`, one line, for what is missing and for what the method has no use for.
    """
    found = find_method(name, "lossy_policy: ")
    missing = [need for need in found.needs if need not in beside]
    if missing:
        options = " and ".join(f"{need}=… ({MAY_BE[need]})" for need in missing)
        on_the_line = " and ".join(f"--{need}" for need in missing)
        raise ValueError(
            f"lossy_policy: {name} needs {' and '.join(f'a {need}' for need in found.needs)}: pass {options} beside its name, "
            f"on the command line {on_the_line}{_suggest_folder(name)}"
        )
    for need in beside:
        if need not in found.parameters:
            raise ValueError(f"lossy_policy: {name} takes no {need}: leave {need}=… out")
    return run_recipe(found, **{need: _load_part(need, value) for need, value in beside.items()}, **settings)


def _load_part(need: str, value: Any) -> Any:
    """Load a head or a profile from a folder or a repository; a companion is loaded when it is first used."""
    if not isinstance(value, str | Path):
        return value
    saved = SAVED.get(need)
    return str(value) if saved is None else saved.from_pretrained(value)


def _suggest_folder(name: str) -> str:
    """Return a hint for a folder that has a method's name, if there is one."""
    return f"; the folder of that name here is ./{name}" if os.path.isdir(name) else ""


def _parse_text(given: str | Path) -> LossyPolicy:
    """Make a policy of a name, JSON, a file or a folder."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        return parse_policy(given, "the text")
    if isinstance(given, str) and is_short_form(given):
        return parse_short_form(given)
    if isinstance(given, str) and any(given in Names(seam) for seam in SEAMS):
        return make_part_policy(given, Names("method"))
    # `os.path`, not `Path`: what is too long for a path is none there, and an error of the system here.
    if os.path.isdir(given):
        return LossyPolicy.from_pretrained(given)
    if isinstance(given, Path) or given.endswith(".json"):
        path = Path(given)
        if not os.path.isfile(path):
            raise ValueError(f"lossy_policy: there is no file {shown(str(path), 300)}")
        spec = read_spec(path)
        load_parts(spec, str(path.parent), path.parent)  # the file may come from anybody, as a folder may
        return LossyPolicy.from_dict(spec)
    if "/" in given:
        may_be_on_the_hub = given.count("/") == 1 and given[0] not in "./~" and not given.endswith("/")
        hint = f"; one on the Hub: LossyPolicy.from_pretrained({shown(given)})" if may_be_on_the_hub else ""
        raise ValueError(f"lossy_policy: there is no folder {shown(given)} here{hint}")
    return make_part_policy(given, Names("method"))
