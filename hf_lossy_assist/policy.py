"""`LossyPolicy`: a rule, a stop and a filter in one frozen bundle, its files, and what `lossy_policy=` may be."""

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from .cards import policy_card
from .errors import check_int, nearest
from .files import new_folder
from .filters import FILTERS, VerifyAll, VerifyFilter
from .heads import CONFIG, WEIGHTS, Head
from .hub import fetch, holds
from .rules import RULES, AcceptanceRule, AllButLast, Judge, Strict
from .stops import STOPS, SVIP, Constant, DraftStop, HeadStop


POLICY = "policy.json"


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
                fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
                out[seam] = {"name": _name_of(value, known)} | {n: _plain(v) for n, v in fields.items()}
        return out

    @classmethod
    def from_dict(cls, spec: Mapping[str, Any], folder: Path | None = None) -> "LossyPolicy":
        """Read the JSON form. Unknown entries, names and parameters are refused, with the nearest match.

        A head is named by its folder (first looked for inside `folder`) or its repository on the Hub, and loaded.
        """
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
        parts = {"rule": self.rule, "stop": self.stop, "filter": self.filter}
        found = {f"{seam}_head": getattr(part, "head", None) for seam, part in parts.items()}
        return {name: head for name, head in found.items() if isinstance(head, Head)}

    def check(self, target: Any, draft: Any, tokenizer: Any = None) -> None:
        """Refuse models that a head in this policy was not trained for; see `Head.check`."""
        for head in self.heads().values():
            head.check(target=target, draft=draft, tokenizer=tokenizer)

    # -- files --------------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | Path, measured: Sequence[tuple[str, str]] = ()) -> None:
        """Write policy.json, a folder for each head and README.md, all or nothing.

        `measured`: rows (what, figure) for the card's table of figures.
        """
        heads = self.heads()
        with new_folder(save_directory) as folder:
            for name, head in heads.items():
                (folder / name).mkdir()
                head.write(folder / name)
            spec = self._spec({id(head): name for name, head in heads.items()})
            (folder / POLICY).write_text(json.dumps(spec, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            policy_card(spec, self.lossless, list(heads.values()), measured).save(folder / "README.md")
        for name, head in heads.items():
            head.source = head.source or str(Path(save_directory, name))

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None,
        commit_message: str = "Upload policy with hf_lossy_assist", measured: Sequence[tuple[str, str]] = (),
    ) -> str:  # fmt: skip
        """Upload what `save_pretrained` writes; returns the commit's URL."""
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        sources = {name: head.source for name, head in self.heads().items()}
        with tempfile.TemporaryDirectory() as made:
            try:
                self.save_pretrained(Path(made, "policy"), measured)
                return str(
                    api.upload_folder(repo_id=repo_id, folder_path=Path(made, "policy"), commit_message=commit_message)
                )
            finally:
                for name, head in self.heads().items():
                    head.source = sources[name]  # the temporary folder is no name to keep

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> "LossyPolicy":
        """Load a policy from a folder or from the Hub (`org/name`, `org/name@revision`).

        A repository that holds a head alone becomes `Sprinter(head)` or `AutoJudge(head)`, as its polarity says.

        Args:
            kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, as everywhere on the Hub.

        Raises: `ValueError`, one line, for what is missing or damaged; `huggingface_hub`'s errors for the repository itself.
        """
        source = str(pretrained_model_name_or_path)
        if not holds(source, POLICY, **kwargs):
            return _of_head(Head.from_pretrained(source, **kwargs))
        [file] = fetch(source, [POLICY], **kwargs)
        spec = _json(file.read_text(encoding="utf-8"), f"the file {str(file)!r}")
        for part in spec.values():
            name = part.get("head") if isinstance(part, dict) else None
            if isinstance(name, str) and "/" not in name:  # a folder beside policy.json; on the Hub not here yet
                fetch(source, (CONFIG, WEIGHTS), subfolder=name, **kwargs)
        return cls.from_dict(spec, file.parent)

    def _spec(self, names: Mapping[int, str]) -> dict[str, Any]:
        """The JSON form with other names for the heads, by their `id`."""
        kept = {key: head.source for key, head in self.heads().items()}
        try:
            for key, head in self.heads().items():
                head.source = names.get(id(head), kept[key])
            return self.to_dict()
        finally:
            for key, head in self.heads().items():
                head.source = kept[key]

    def __str__(self) -> str:
        try:
            return json.dumps(self.to_dict()) if self.to_dict() else "strict"
        except ValueError:  # a rule, stop or filter of the user's own, without a name
            return repr(self)


class Sprinter(LossyPolicy):
    """SPRINTER: draft while the head V says ≥ `threshold`, accept all drafted tokens but the last unseen, verify that one.

    Zhong et al., "Speeding up Speculative Decoding via Sequential Approximate Verification"
    (huggingface.co/papers/2502.04557). **Lossy**: η_FP of the tokens that strict acceptance would doubt stay in the text.
    `threshold` above 1 doubts every token and is bit-equal to strict acceptance with γ = 1.

    Args:
        head (`Head`): from `hf-lossy fit sprinter`, or `Head.from_pretrained(…)`.
        threshold: τ; lower drafts longer and loses more. `hf-lossy plan` measures which one pays.
        max_draft: the most tokens of one round.
        patience: see `HeadStop`; matters in batches alone. 0, the default, ends the round for all rows when one stops: 1.15 ×
            strict acceptance in batches of 32 on the demo, where waiting for every row gives 0.80 × (docs/log.md). With 1 each
            row's greedy text is the one it would have alone.
    """

    def __init__(
        self, head: Head, threshold: float = HeadStop.threshold, max_draft: int = HeadStop.max_draft, patience: float = 0.0
    ):  # fmt: skip
        super().__init__(rule=AllButLast(), stop=HeadStop(head, threshold, max_draft, patience))


class AutoJudge(LossyPolicy):
    """AutoJudge: strict acceptance, but a mismatch that the head finds unimportant is kept, and the rest of the draft with it.

    Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039). **Lossy**: the
    output is no longer the target's; what that costs on your task only a measurement there can tell. `threshold` 0 is
    bit-equal to strict acceptance with the same window, 1 keeps everything.

    Args:
        head (`Head`): from `hf-lossy fit autojudge`, or `Head.from_pretrained(…)`.
        threshold: a mismatch is kept where P(important) < threshold; None takes the head's own (recall ≥ 90 % when it was made).
        window: tokens drafted a round, by default 32; longer than strict acceptance wants, for more of them are kept (the
            paper: 64, and in vLLM tuned for each pair of models).
        stop (`DraftStop`, *optional*): in place of a constant window, `SVIP()` for example.
    """

    def __init__(
        self, head: Head, threshold: float | None = None, window: int | None = None, stop: DraftStop | None = None
    ):  # fmt: skip
        if window is not None:
            check_int("AutoJudge.window", window, 1)
            if stop is not None:
                raise ValueError("AutoJudge: window and stop both say how much is drafted: pass one of them")
        super().__init__(rule=Judge(head, threshold), stop=stop or Constant(window or 32))


POLICIES: dict[str, LossyPolicy] = {
    "strict": LossyPolicy(),
    "svip": LossyPolicy(stop=SVIP()),
}


# Policies that are nothing without a trained head.
METHODS: dict[str, type[Sprinter] | type[AutoJudge]] = {"sprinter": Sprinter, "autojudge": AutoJudge}


def _of_head(head: Head) -> LossyPolicy:
    """The method that a head's polarity makes it fit for, with its own settings."""
    return AutoJudge(head) if head.config.polarity == "important" else Sprinter(head)


def as_policy(given: Any) -> LossyPolicy:
    """What `lossy_policy=` accepts: a `LossyPolicy`, a rule, a stop or a filter alone, a trained head, a name, the JSON form
    as a dict or as text, the path of a JSON file or of a folder that `save_pretrained` wrote.

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
    if isinstance(given, Head):
        return _of_head(given)
    if isinstance(given, Path) and given.is_dir():
        return LossyPolicy.from_pretrained(given)
    if isinstance(given, str) and not given.lstrip().startswith("{") and Path(given).is_dir():
        return LossyPolicy.from_pretrained(given)
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".json")):
        path = Path(given)
        if not path.is_file():
            raise ValueError(f"lossy_policy: there is no file {str(path)!r}")
        return _parse(path.read_text(encoding="utf-8"), f"the file {str(path)!r}", path.parent)
    if isinstance(given, str):
        if given.lstrip().startswith("{"):
            return _parse(given, "the text")
        if given in POLICIES:
            return POLICIES[given]
        if given in METHODS:
            raise ValueError(
                f"lossy_policy: {given} needs a head: pass {METHODS[given].__name__}(Head.from_pretrained(…)), on the "
                "command line --head"
            )
        hint = " One on the Hub: LossyPolicy.from_pretrained(…)." if given.count("/") == 1 else ""
        raise ValueError(f"lossy_policy: {nearest('policy', given, POLICIES)}{hint}")
    if isinstance(given, type):
        raise TypeError(f"lossy_policy: got the class {given.__name__}; pass an object of it, {given.__name__}(…)")
    raise TypeError(
        f"lossy_policy: expected a LossyPolicy, a rule, a stop, a name, a dict or a JSON file, got {type(given).__name__}"
    )


def _parse(text: str, where: str, folder: Path | None = None) -> LossyPolicy:
    return LossyPolicy.from_dict(_json(text, where), folder)


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        spec = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"lossy_policy: {where} is not JSON: {error}") from None
    if not isinstance(spec, dict):
        raise ValueError(f'lossy_policy: {where} holds {spec!r}; expected an object such as {{"stop": "svip"}}')
    return spec


def _plain(value: Any) -> Any:
    """A parameter as JSON: a head by the name of its folder or repository."""
    if not isinstance(value, Head):
        return value
    if value.source is None:
        raise ValueError("a head that was never saved has no JSON form: head.save_pretrained(…) first")
    return value.source


def _build(seam: str, spec: Any, known: Mapping[str, type], folder: Path | None = None) -> Any:
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
    if isinstance(parameters.get("head"), str):
        inside = None if folder is None else folder / parameters["head"]
        parameters["head"] = Head.from_pretrained(
            str(inside) if inside is not None and inside.is_dir() else parameters["head"]
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
