"""`LossyPolicy`: a rule, a stop and a filter in one frozen bundle, and its files."""

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import PreTrainedModel

from ..artifacts.cards import policy_card, save_card
from ..artifacts.files import new_folder
from ..artifacts.heads import Head
from ..artifacts.hub import fetch, holds, hub_errors
from ..artifacts.profile import Profile
from ..artifacts.reading import check_depth, read_json
from ..artifacts.reading import parse as parse_json
from ..artifacts.references import check_shareable, load_parts
from ..filters import FILTERS
from ..filters.base import VerifyAll, VerifyFilter
from ..rules import RULES, AcceptanceRule, BlockVerification, Strict
from ..stops import STOPS, Constant, DraftStop, Fallback
from ..validation import nearest, shown


POLICY = "policy.json"
LONGEST = 2**20  # bytes of it
PARTS = (AcceptanceRule, DraftStop, VerifyFilter)


@dataclass(frozen=True, eq=False)
class LossyPolicy:
    """What a round does beyond lossless speculative decoding: nothing, unless you say so.

    Args:
        rule (`AcceptanceRule`): which drafted tokens to accept; neutral: `Strict()`.
        stop (`DraftStop`, *optional*): when a row has drafted enough. None leaves it to the call's `num_assistant_tokens`,
            `num_assistant_tokens_schedule` and `assistant_confidence_threshold`, then to the same settings of the draft's
            generation config, and in the end to 5 tokens a round.
        filter (`VerifyFilter`): how many drafted tokens of each row go to the target; neutral: `VerifyAll()`.

    The JSON form is `{"rule": …, "stop": …, "filter": …}`; each entry is a name or `{"name": …, parameter: value, …}`,
    and a neutral entry is left out. A rule inside a rule is such an entry too.
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
                raise TypeError(f"LossyPolicy.{seam}: expected an object of {base.__name__}, got {shown(value)}")
        if isinstance(self.rule, BlockVerification) and self.filter.depends_on_token:
            raise ValueError(
                "BlockVerification needs drafted tokens as they were drawn, and this filter drops some for their own sake: "
                "give it exact='prefix', or use Strict()"
            )
        if self.stop is not None and self.stop.patience < 1 and self.filter.joint and self.filter.lossless:
            raise ValueError(
                f"{type(self.stop).__name__} with patience {self.stop.patience} ends a row's draft for what another row drafted, and a filter "
                "that weighs rows against each other is then no longer lossless: give the stop patience=1"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LossyPolicy):  # a Sprinter equals what its JSON form builds
            return NotImplemented
        return (self.rule, self.stop, self.filter) == (other.rule, other.stop, other.filter)

    def __hash__(self) -> int:
        return hash((self.rule, self.stop, self.filter))

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
                out[seam] = _plain(value, known)
        return out

    @classmethod
    def from_dict(cls, spec: Mapping[str, Any], folder: Path | None = None) -> "LossyPolicy":
        """Read the JSON form. Unknown entries, names and parameters are refused, with the nearest match.

        A head is named by its folder (first looked for inside `folder`) or its repository on the Hub, and loaded. Where a part is
        made of others of its kind, they stand in its entry in the same form: `{"name": "any_of", "stops": ["svip", …]}`.
        """
        check_depth(spec, "lossy_policy")
        seams: dict[str, Mapping[str, type]] = {"rule": RULES, "stop": STOPS, "filter": FILTERS}
        for key in spec:
            if key not in seams:
                raise ValueError(f"lossy_policy: {nearest('entry', str(key), seams)}")
        built = {
            seam: _build(seam, spec[seam], known, folder)
            for seam, known in seams.items()
            if spec.get(seam) is not None
        }
        return LossyPolicy(**built)

    def heads(self) -> dict[str, Head]:
        """The trained heads in this policy, by the name of the subfolder that each is saved in."""
        return {name: part for name, part in self._saved().items() if isinstance(part, Head)}

    def _saved(self) -> dict[str, Head | Profile]:
        """Everything that is saved in a subfolder of its own, by that folder's name: "stop_head", "stop_0_head" of a part's first part."""
        parts = [*_parts("rule", self.rule), *_parts("stop", self.stop), *_parts("filter", self.filter)]
        found = {f"{name}_{what}": getattr(part, what, None) for name, part in parts for what in ("head", "profile")}
        return {name: part for name, part in found.items() if isinstance(part, Head | Profile)}

    def check(self, target: Any, draft: Any, tokenizer: Any = None, longest: int = 0) -> None:
        """Refuse models that a head in this policy was not trained for (`Head.check`), and what its filter was not made for.

        `longest`: the most tokens that a row may draft in this call.
        """
        for head in self.heads().values():
            head.check(target=target, draft=draft, tokenizer=tokenizer)
        if self.stop is not None:
            self.stop.check(target, draft, tokenizer)
        self.filter.check(target, draft, tokenizer, longest)

    def with_fallback(self, **settings: Any) -> "LossyPolicy":
        """The same policy, whose drafting switches itself off while it does not pay; `settings` as of `Fallback`."""
        return LossyPolicy(self.rule, Fallback(self.stop or Constant(), **settings), self.filter)

    # -- files --------------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | Path, measured: Sequence[tuple[str, str]] = ()) -> None:
        """Write policy.json, a folder for each head and README.md, all or nothing. Another README.md there stays.

        `measured`: rows (what, figure) for the card's table of figures.
        """
        saved = self._saved()
        with new_folder(save_directory) as folder:
            for name, part in saved.items():
                (folder / name).mkdir()
                part.write(folder / name)
            spec = self._spec({id(part): name for name, part in saved.items()})
            (folder / POLICY).write_text(json.dumps(spec, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            card = policy_card(spec, self.lossless, list(self.heads().values()), measured)
            save_card(card, folder, Path(save_directory))
        for name, part in saved.items():
            part.source = part.source or str(Path(save_directory, name))

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None,
        commit_message: str = "Upload policy with hf_lossy_assist", measured: Sequence[tuple[str, str]] = (),
    ) -> str:  # fmt: skip
        """Upload what `save_pretrained` writes; returns the commit's URL.

        Raises: `ValueError` where the companion is a folder here, which others do not have.
        """
        check_shareable(self._spec({id(part): name for name, part in self._saved().items()}))
        api = HfApi(token=token)
        with hub_errors(repo_id):
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        sources = {name: part.source for name, part in self._saved().items()}
        with tempfile.TemporaryDirectory() as made, hub_errors(repo_id):
            try:
                self.save_pretrained(Path(made, "policy"), measured)
                return str(
                    api.upload_folder(repo_id=repo_id, folder_path=Path(made, "policy"), commit_message=commit_message)
                )
            finally:
                for name, part in self._saved().items():
                    part.source = sources[name]  # the temporary folder is no name to keep

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> "LossyPolicy":
        """Load a policy from a folder or from the Hub (`org/name`, `org/name@revision`).

        Its heads and its profile are sub-folders of its own or other repositories on the Hub; nothing else on this disk is read.
        A repository that holds a head alone becomes the policy that it was trained for: `Sprinter(head)`, `AutoJudge(head)` or `SpecDecPP(head)`.

        Args:
            kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, as everywhere on the Hub.

        Raises: `ValueError`, one line, for what is missing or damaged; `huggingface_hub`'s errors for the repository itself.
        """
        source = str(pretrained_model_name_or_path)
        if not holds(source, POLICY, **kwargs):
            from .methods import of_head  # methods are policies: they import this file

            return of_head(Head.from_pretrained(source, **kwargs))
        [file] = fetch(source, [POLICY], **kwargs)
        spec = spec_in(file)
        load_parts(spec, source, file.parent, **kwargs)
        return cls.from_dict(spec)

    def _spec(self, names: Mapping[int, str]) -> dict[str, Any]:
        """The JSON form with other names for the heads, by their `id`."""
        kept = {key: part.source for key, part in self._saved().items()}
        try:
            for key, part in self._saved().items():
                part.source = names.get(id(part), kept[key])
            return self.to_dict()
        finally:
            for key, part in self._saved().items():
                part.source = kept[key]

    def __str__(self) -> str:
        try:
            return json.dumps(self.to_dict()) if self.to_dict() else "strict"
        except ValueError:  # a rule, stop or filter of the user's own, without a name
            return repr(self)


def parse(text: str, where: str, folder: Path | None = None) -> LossyPolicy:
    return LossyPolicy.from_dict(_object(parse_json(text, f"lossy_policy: {where}", infinite=True), where), folder)


def spec_in(file: Path) -> dict[str, Any]:
    """The JSON form in a file."""
    where = f"the file {shown(str(file), 200)}"
    return _object(read_json(file, f"lossy_policy: {where}", infinite=True, longest=LONGEST), where)


def _object(spec: Any, where: str) -> dict[str, Any]:
    if not isinstance(spec, dict):
        raise ValueError(f'lossy_policy: {where} holds {shown(spec)}; expected an object such as {{"stop": "svip"}}')
    return spec


def _parts(name: str, part: Any) -> Iterator[tuple[str, Any]]:
    """A rule, stop or filter and, if it is made of others of its kind, those as well, each with a name."""
    if part is None:
        return
    yield name, part
    inside = [getattr(part, f.name) for f in dataclasses.fields(part)]
    nested = [v for value in inside for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, PARTS)]
    for i, value in enumerate(nested):
        yield from _parts(f"{name}_{i}", value)


def _plain(value: Any, known: Mapping[str, type]) -> Any:
    """A part or a parameter as JSON: a head, a profile or a model by the name of its folder or repository."""
    if isinstance(value, PARTS):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"name": _name_of(value, known)} | {name: _plain(v, known) for name, v in fields.items()}
    if isinstance(value, tuple):
        return [_plain(v, known) for v in value]
    if isinstance(value, PreTrainedModel):
        return value.config.name_or_path
    if not isinstance(value, Head | Profile):
        if value is None or isinstance(value, bool | int | float | str | list | dict):
            return value
        raise ValueError(f"{shown(value)} has no JSON form: pass a number, a text or the name of a folder")
    if value.source is None:
        what = type(value).__name__.lower() if isinstance(value, Profile) else "head"
        raise ValueError(f"a {what} that was never saved has no JSON form: {what}.save_pretrained(…) first")
    return value.source


def _build(seam: str, spec: Any, known: Mapping[str, type], folder: Path | None = None) -> Any:
    if isinstance(spec, tuple(known.values())):
        return spec
    parameters = {"name": spec} if isinstance(spec, str) else spec
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("name"), str):
        raise ValueError(f'lossy_policy: {seam}: expected a name or {{"name": …}}, got {shown(spec)}')
    parameters = dict(parameters)
    name = parameters.pop("name")
    if name not in known:
        raise ValueError(f"lossy_policy: {nearest(seam, name, known)}")
    fields = {f.name for f in dataclasses.fields(known[name])}
    for parameter in parameters:
        if parameter not in fields:
            raise ValueError(f"lossy_policy: {nearest(f'parameter of {seam} {name!r}', str(parameter), fields)}")
    if seam in parameters:  # made of another of its kind, or of several
        parameters[seam] = _build(seam, parameters[seam], known, folder)
    if isinstance(parameters.get(f"{seam}s"), list | tuple):
        parameters[f"{seam}s"] = tuple(_build(seam, part, known, folder) for part in parameters[f"{seam}s"])
    for part, kind in (("head", Head), ("profile", Profile)):
        if isinstance(parameters.get(part), str):
            inside = None if folder is None else folder / parameters[part]
            parameters[part] = kind.from_pretrained(
                str(inside) if inside is not None and inside.is_dir() else parameters[part]
            )
    try:
        return known[name](**parameters)
    except TypeError as error:
        missing = [f for f in fields if f in str(error)] if "missing" in str(error) else []
        if not missing:
            raise
        raise ValueError(f"lossy_policy: {seam} {name!r} needs {', '.join(sorted(missing))}") from None


def _name_of(value: Any, known: Mapping[str, type]) -> str:
    for name, cls in known.items():
        if type(value) is cls:
            return name
    raise ValueError(f"{type(value).__name__} has no name: add it to the dict of its file to give it a JSON form")
