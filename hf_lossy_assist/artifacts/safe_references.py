"""Restrict the references in a policy's folder, which is untrusted, to its sub-folders and repositories on the Hub; nothing else on this disk."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..validation import shown
from .head import CONFIG, WEIGHTS, Head
from .sv_profile import PROFILE, TABLES, Profile


SUBFOLDER = re.compile(r"\w[\w.-]{,99}")  # a single folder, beside policy.json
ON_THE_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
KINDS: tuple[tuple[str, type[Head | Profile], tuple[str, str]], ...] = (
    ("head", Head, (CONFIG, WEIGHTS)),
    ("profile", Profile, (PROFILE, TABLES)),
)


def walk_objects(spec: object) -> Iterator[dict[str, object]]:
    """Yield every object in a policy's JSON form."""
    if isinstance(spec, dict):
        yield spec
    for value in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        yield from walk_objects(value)


def load_parts(spec: object, source: str, folder: Path, *, companion: object = None, **kwargs: Any) -> None:
    """Replace the names of heads and profiles in a policy's JSON form by the loaded objects.

    `source`: the policy's folder or repository; `folder`: that of its policy.json on this disk. `companion`: replaces every companion that the
    policy names; chosen by the caller, so it may be anything. `kwargs`: see `hub.fetch`.
    """
    if companion is not None and not any("companion" in part for part in walk_objects(spec)):
        raise ValueError(f"{source}: this policy has no companion: leave companion=… out")
    for part in walk_objects(spec):
        for key, kind, files in KINDS:
            if isinstance(name := part.get(key), str):
                if SUBFOLDER.fullmatch(name) and os.path.isdir(source):
                    _check_subfolder(folder / name, files, f"{source}: the {key} {shown(name)}")
                part[key] = _load(kind, key, name, source, folder, kwargs)
        if "companion" in part and companion is not None:
            part["companion"] = companion
        elif isinstance(name := part.get("companion"), str):
            _check_on_the_hub("companion", name)


def check_shareable(spec: object) -> None:
    """Refuse a policy that, on the Hub, would refer to a path on this disk."""
    for part in walk_objects(spec):
        if isinstance(name := part.get("companion"), str):
            _check_on_the_hub("companion", name)


def _load(
    kind: type[Head | Profile], key: str, name: str, source: str, folder: Path, kwargs: dict[str, Any]
) -> Head | Profile:
    if SUBFOLDER.fullmatch(name):
        found = kind.from_pretrained(source, subfolder=name, **kwargs)
        found.source = str(folder / name)
        return found
    _check_on_the_hub(key, name)
    return kind.from_pretrained(name, **{key: value for key, value in kwargs.items() if key != "revision"})


def _check_subfolder(subfolder: Path, files: Iterable[str], what: str) -> None:
    """Refuse a sub-folder that is a link, or that contains a linked file: either would lead elsewhere on this disk.

    Files in the Hub's cache are links to the blobs beside its snapshots, created by the client.
    """
    snapshot = subfolder.parent.resolve()
    blobs = snapshot.parent.parent / "blobs" if snapshot.parent.name == "snapshots" else None
    for path in (subfolder, *(subfolder / name for name in files)):
        if path.is_symlink() and (path == subfolder or path.resolve().parent != blobs):
            where = "" if path == subfolder else f": its {path.name}"
            raise ValueError(f"{what}{where} is a link to another place: put a copy in its place")


def _check_on_the_hub(key: str, name: str) -> None:
    if not ON_THE_HUB.fullmatch(name):
        alternative = "" if key == "companion" else "one of its own sub-folders or "
        way_out = ": pass one on this disk yourself, from_pretrained(…, companion=…)" if key == "companion" else ""
        raise ValueError(
            f"a policy's folder names as its {key} {alternative}a repository on the Hub (org/name), not {shown(name)}{way_out}"
        )
    if os.path.exists(name):
        raise ValueError(
            f"this policy names its {key} {shown(name)} on the Hub, and a folder here has that name too, which would be taken "
            "instead: rename that, or run in another folder"
        )
