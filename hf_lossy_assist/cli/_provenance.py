"""With which models a dataset, a head or a profile was made, so that later commands need not be told again.

Only what a command wrote into this very folder of this machine counts. A repository may name any model, and none is loaded because of that.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..artifacts.files import MADE_WITH, write_text
from ..artifacts.json_io import read_object
from ..terminal import show
from ..validation import one_line, shown
from ._options import DEMO, ModelOptions


DEMO_TARGETS = ("demo-target", "demo-target:int8")  # how records name the demo's


@dataclass(frozen=True)
class ModelNames:
    """The options that named the models; None: the demo's, or none."""

    model: str | None = None
    assistant: str | None = None
    companion: str | None = None
    dtype: str = "float32"
    chat: bool = False
    drafter: str | None = None  # in the place of the assistant

    def words(self) -> str:
        """The models as they are typed."""
        given = {
            "--model": self.model,
            "--assistant": self.assistant,
            "--companion": self.companion,
            "--drafter": self.drafter,
        }
        return " ".join(f"{name} {value}" for name, value in given.items() if value is not None)


def names_of(options: ModelOptions, **more: Any) -> ModelNames:
    """Note the models that options name. more: other fields."""
    return ModelNames(options.model, options.assistant, drafter=options.drafter, **more)


class Source(NamedTuple):
    """What models may be remembered from: its folder or name on the Hub, and the names of the models in its own record."""

    name: str | None
    target: str | None
    draft: str | None


def remember(out: Path, names: ModelNames) -> None:
    """Write down with which models the folder `out` was made, if they are not the demo's."""
    if names.model is names.assistant is names.drafter is None or int(os.environ.get("RANK", "0")) != 0:
        return
    whole = {name: absolute(getattr(names, name)) for name in ("model", "assistant", "companion")}
    whole["drafter"] = names.drafter if names.drafter == DEMO else absolute(names.drafter)
    facts = {"folder": str(out.resolve())} | asdict(names) | whole
    write_text(out / MADE_WITH, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def copy_names(data: Path, out: Path) -> None:
    """Remember for a head the models of its dataset."""
    names = _written(data)
    if names is not None:
        remember(out, names)


def recall(folder: str | Path) -> ModelNames | None:
    """Read what `remember` wrote into this folder; None where there is nothing, or a copy from elsewhere.

    Raises: `ValueError`, one line, where a model's folder is gone.
    """
    names = _written(folder)
    for name in () if names is None else (names.model, names.assistant, names.companion, names.drafter):
        if name is not None and Path(name).is_absolute() and not Path(name).exists():
            way = [f"--{option}" for option in ("model", "assistant", "drafter") if names and getattr(names, option)]
            pair = "--model and --assistant" if names and names.drafter is None else " and ".join(way)
            raise ValueError(f"{folder} was made with {shown(name, 200)}, which is not there any more: pass {pair}")
    return names


def _written(folder: str | Path) -> ModelNames | None:
    """Read the note in a folder, if it was written there; the models may be gone."""
    file = Path(folder) / MADE_WITH
    if file.is_symlink() or not file.is_file():  # a link: the Hub's cache, whose files others wrote
        return None
    facts = read_object(file)
    if facts.pop("folder", None) != str(Path(folder).resolve()):
        return None
    facts.setdefault("drafter", None)  # notes of older versions have none
    kinds = {"dtype": str, "chat": bool}
    if facts.keys() != {f.name for f in fields(ModelNames)} or not all(
        isinstance(value, kinds.get(name, str)) or (value is None and name not in kinds)
        for name, value in facts.items()
    ):
        raise ValueError(f"{file}: expected the names of models, got {shown(facts)}: delete it and pass --model")
    return ModelNames(**facts)


def models_from(options: ModelOptions, sources: Iterable[Source]) -> ModelNames:
    """Take the models that the options name; where they name none those that a source was made with, which one line says.

    Raises: `ValueError`, one line, for a source that was made for models that are neither remembered nor the demo's.
    """
    if not options.demo:
        return names_of(options)
    strange = None
    for source in sources:
        names = None if source.name is None else recall(source.name)
        if names is not None:
            how = [f"--dtype {names.dtype}"] * (names.dtype != "float32") + ["--chat"] * names.chat
            note = f" (it was made with {' '.join(how)})" if how else ""
            show(f"models of {source.name}: {names.words()}{note}", file=sys.stderr)
            return names
        if source.target not in (None, *DEMO_TARGETS):
            strange = strange or source
    if strange is not None:
        raise ValueError(
            f"{strange.name} was made for the models {one_line(strange.target)} and {one_line(strange.draft)}: pass --model and --assistant "
            "(what a record names is not loaded by itself)"
        )
    return ModelNames()


def parts_in(policy: Any) -> Iterator[Any]:
    """Find the heads and profiles of a policy, however deep they are in it."""
    from ..artifacts.head import Head
    from ..artifacts.sv_profile import Profile

    if isinstance(policy, Head | Profile):
        yield policy
    elif is_dataclass(policy):
        for field in fields(policy):
            yield from parts_in(getattr(policy, field.name))
    elif isinstance(policy, list | tuple):
        for part in policy:
            yield from parts_in(part)


def sources_in(parts: Iterable[Any]) -> list[Source]:
    """Name heads and profiles as sources of models."""
    found = []
    for part in parts:
        record = getattr(part, "config", part)  # a head's identities are in its config, a profile's in itself
        names = (None if model is None else model.id for model in (record.target, record.draft))
        found.append(Source(part.source, *names))
    return found


def folder_of(policy: str) -> list[Source]:
    """Name a policy's folder as a source of models. A bare name is no folder's."""
    return [Source(policy, None, None)] if "/" in policy and Path(policy).is_dir() else []


def warn_of_other_decoding(parts: Iterable[Any], do_sample: bool) -> None:
    """Say of each head that was trained on another kind of decoding than this run's that it was."""
    from ..artifacts.head import Head

    here, there = ("sampling", "greedy decoding") if do_sample else ("greedy decoding", "sampling")
    for head in {part.source: part for part in parts if isinstance(part, Head)}.values():
        if head.config.decoding.get("do_sample", do_sample) != do_sample:
            command = "mine" if head.config.method == "autojudge" else "collect"
            option = "--do-sample" if do_sample else "--greedy"
            show(
                f"remark: the head {head.source} was trained for {there}, and this is {here}: it knows these texts less well; "
                f"hf-lossy {command} {option} makes data for them",
                file=sys.stderr,
            )


def warn_of_unused_companion(policy: Any, rows: int) -> None:
    """Say that `sv` asks no companion where its profile says that none pays for itself with so many rows."""
    profile = getattr(getattr(policy, "filter", None), "profile", None)
    if profile is not None and policy.filter.fallback and not profile.worthwhile(rows):
        show(
            f"remark: sv is strict acceptance here: its profile expects no gain from a companion at batch size {rows} (hf-lossy profile)",
            file=sys.stderr,
        )


def absolute(name: str | None) -> str | None:
    """Give a folder by its whole path, another name (on the Hub, or int8) as it is."""
    return str(Path(name).resolve()) if name is not None and Path(name).exists() else name
