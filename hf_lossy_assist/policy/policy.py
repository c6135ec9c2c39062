"""`LossyPolicy`: a rule, a stop and a filter, and their files."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import ModelCard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..artifacts.artifact import Artifact
from ..artifacts.cards import render
from ..artifacts.certificate import Certificate
from ..artifacts.files import JSONObject
from ..artifacts.head import CONFIG, WEIGHTS, Head
from ..artifacts.hub import CERTIFICATE, POLICY, fetch
from ..artifacts.sv_profile import PROFILE, TABLES, Profile
from ..drafters.base import Drafter
from ..filters.base import VerifyAll, VerifyFilter
from ..registry import Entry, Kind, find_entry
from ..registry.frozen import Frozen
from ..rules import AcceptanceRule, Strict
from ..rules.base import BlockVerification
from ..stops import DraftStop
from ..stops.constant import Constant
from ..stops.fallback import Fallback
from ..validation import shown
from .json_form import (
    ANY_PART,
    PARTS,
    SAVED,
    build_parts,
    check_shareable,
    format_spec,
    load_references,
    make_entry,
    read_spec,
    serialise,
)


FILES = (POLICY, CERTIFICATE, CONFIG, WEIGHTS, *(f"*/{name}" for name in (CONFIG, WEIGHTS, PROFILE, TABLES)))


@dataclass(frozen=True)
class LossyPolicy(Frozen, Artifact):
    """A rule, a stop and a filter. By default: lossless speculative decoding.

    Args:
        rule (`AcceptanceRule`): which drafted tokens to accept; neutral: `Strict()`.
        stop (`DraftStop`, *optional*): when a row has drafted enough. None: the call's `num_assistant_tokens`,
            `num_assistant_tokens_schedule` and `assistant_confidence_threshold`, then the same settings of the draft's
            generation config, then 5 tokens a round.
        filter (`VerifyFilter`): how many drafted tokens of each row go to the target; neutral: `VerifyAll()`.
        certificate (`Certificate`, *optional*): the loss that `hf-lossy tune` measured for this policy; `from_pretrained` reads it.

    The JSON form is `{"rule": …, "stop": …, "filter": …}`; each entry is a name or `{"name": …, parameter: value, …}`,
    and neutral entries are omitted. Nested rules have the same form.
    """

    kind: ClassVar[str] = "policy"

    rule: AcceptanceRule = field(default_factory=Strict)
    stop: DraftStop | None = None
    filter: VerifyFilter = field(default_factory=VerifyAll)
    certificate: Certificate | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rule, BlockVerification) and self.filter.depends_on_token:
            raise ValueError(
                "BlockVerification needs drafted tokens as they were drawn, and this filter drops some for their own sake: "
                "give it exact='prefix', or use Strict()"
            )
        stop = self.stop
        if stop is not None and (stop.patience < 1 or stop.joint) and self.filter.joint and self.filter.lossless:
            raise ValueError(
                f"{type(stop).__name__} with patience {stop.patience} ends a row's draft for what another row drafted, and a filter "
                "that weighs rows against each other is then no longer lossless: take patience=1, or a stop that is not joint"
            )

    @property
    def lossless(self) -> bool:
        """Whether the output has exactly the target's distribution (and greedy output equals the target's)."""
        return self.rule.lossless and self.filter.lossless

    def to_dict(self) -> JSONObject:
        """Return the JSON form; `from_dict` converts it back to an equal policy.

        Raises: `ValueError`, one line, for a part without a name and for a head that was never saved.
        """
        return self._spec({})

    @classmethod
    def from_dict(cls, spec: Mapping[str, object]) -> "LossyPolicy":
        """Build a policy from its JSON form. Raises: `ValueError`, with the nearest match, for unknown entries, names and parameters.

        Heads are given by folder or Hub repository, and loaded. The parts of a composite stand in its entry in the same form:
        `{"name": "any_of", "stops": ["svip", …]}`.
        """
        return cls(**build_parts(spec))

    def heads(self) -> dict[str, Head]:
        """Return the trained heads in this policy, by the name of the subfolder that each is saved in."""
        return {name: item for name, item in self.saved().items() if isinstance(item, Head)}

    def saved(self) -> dict[str, Head | Profile]:
        """Return the parts that are saved in subfolders, by folder name: "stop_head", or "stop_0_head" for the first nested stop."""
        items = [item for kind in PARTS for item in _walk_parts(kind, getattr(self, kind))]
        saved = {f"{name}_{what}": getattr(item, what, None) for name, item in items for what in SAVED}
        return {name: item for name, item in saved.items() if isinstance(item, Head | Profile)}

    def _spec(self, names: Mapping[int, str]) -> JSONObject:
        """Return the JSON form. `names`: by `id`, names of heads and profiles that replace the paths they were loaded from."""
        neutral: dict[Kind, object] = {"rule": Strict(), "stop": None, "filter": VerifyAll()}
        values = {kind: getattr(self, kind) for kind in PARTS}
        return {kind: serialise(value, kind, names) for kind, value in values.items() if value != neutral[kind]}

    def check(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        longest: int = 0,
    ) -> None:
        """Raise an error for models that a head (`Head.check`), the stop or the filter does not support.

        `longest`: the maximum number of tokens that a row may draft in this call.
        """
        for head in self.heads().values():
            head.check(target=target, draft=draft, tokenizer=tokenizer)
        if self.stop is not None:
            self.stop.check(target, draft, tokenizer)
        self.filter.check(target, draft, tokenizer, longest)

    def with_fallback(self, **settings: Any) -> "LossyPolicy":
        """Return the same policy with drafting disabled while it does not pay; `settings` as in `Fallback`."""
        return LossyPolicy(self.rule, Fallback(self.stop or Constant(), **settings), self.filter)

    def _shared_spec(self) -> JSONObject:
        """Return the JSON form with the names of sub-folders for heads and profiles."""
        return self._spec({id(item): name for name, item in self.saved().items()})

    def write(self, folder: Path) -> None:
        for name, item in self.saved().items():
            (folder / name).mkdir()
            item.write(folder / name)
        (folder / POLICY).write_text(format_spec(self._shared_spec()), encoding="utf-8")
        read_spec(folder / POLICY)
        if self.certificate is not None:
            self.certificate.write(folder)

    def card(self) -> ModelCard:
        heads = [head.config for head in self.heads().values()]
        models = [model for config in heads for model in (config.target, config.draft)]
        certificate = self.certificate
        return render(
            "policy.md",
            models,
            "",
            ("", "", ()) if certificate is None else ("policy", certificate.task, certificate.results()),
            lossless=self.lossless,
            heads=heads,
            measured=() if certificate is None else certificate.rows(),
            json=format_spec(self._shared_spec()).rstrip(),
        )

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write policy.json, the certificate if any, a folder for each head and README.md, all or nothing. A README.md that is there stays.

        A companion is written by name only; pass a local one again to `from_pretrained(…, companion=…)`. A head without a source takes its
        new folder as source.
        """
        super().save_pretrained(save_directory)
        if self.certificate is None:
            Path(save_directory, CERTIFICATE).unlink(missing_ok=True)
        for name, item in self.saved().items():
            item.source = item.source or str(Path(save_directory, name))

    def push_to_hub(self, repo_id: str, **settings: Any) -> str:
        """Upload the files of `save_pretrained`, as `Head.push_to_hub` does; return the commit's URL.

        Raises: `ValueError` if the companion is a local folder, which others do not have.
        """
        check_shareable(self._shared_spec())
        return super().push_to_hub(repo_id, **settings)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        companion: PreTrainedModel | str | None = None,
        **kwargs: Any,
    ) -> "LossyPolicy":
        """Load a policy from a folder or from the Hub (`org/name`, `org/name@revision`).

        Heads and profile are read from sub-folders or other Hub repositories, never from elsewhere on this disk. A repository with only a
        head becomes the policy that it was trained for: `Sprinter(head)`, `AutoJudge(head)` or `SpecDecPP(head)`.

        Args:
            companion (`PreTrainedModel` or `str`, *optional*): replaces the companion that the policy names, a Hub repository, by any local
                folder or loaded model.
            kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, as in `huggingface_hub`.

        Raises: `ValueError`, one line, for missing or damaged files; `huggingface_hub`'s errors for the repository itself.
        """
        source = str(pretrained_model_name_or_path)
        folder = fetch(source, FILES, **kwargs)
        if not (folder / POLICY).is_file():
            if not (folder / CONFIG).is_file():
                raise ValueError(f"{source} holds no policy ({POLICY}) and no head ({CONFIG})")
            head = Head.read(folder)
            head.source = source
            return make_head_policy(head)
        spec = read_spec(folder / POLICY)
        load_references(spec, folder, companion=companion, **kwargs)
        policy = cls.from_dict(spec)
        return replace(policy, certificate=Certificate.read(folder)) if (folder / CERTIFICATE).is_file() else policy

    def __str__(self) -> str:
        try:
            return json.dumps(self.to_dict()) if self.to_dict() else "strict"
        except ValueError:  # a user's rule, stop or filter without a name
            return repr(self)


def _walk_parts(name: str, item: object) -> Iterator[tuple[str, object]]:
    """Yield a rule, stop or filter and its nested parts, each with a name."""
    if not isinstance(item, ANY_PART):
        return
    yield name, item
    values = [getattr(item, f.name) for f in fields(item)]
    flat = [inner for value in values for inner in (value if isinstance(value, tuple) else (value,))]
    for i, inner in enumerate(value for value in flat if isinstance(value, ANY_PART)):
        yield from _walk_parts(f"{name}_{i}", inner)


def make_head_policy(head: Head) -> LossyPolicy:
    """Return the policy of the method that a head's config names, with the head's settings.

    Raises: `ValueError`, one line, for an unregistered method and for a head with another polarity than the method's.
    """
    method = find_entry("method", head.config.method, "this head's config names an ")
    kind = None if method.head_kind is None else method.head_kind.polarity
    if kind != head.config.polarity:
        line = f"this head says P({head.config.polarity}), and its config names the method {method.name!r}"
        raise ValueError(f"{line}, whose heads say P({kind}): give HeadConfig(method=…) another")
    return make_method_policy(method, {"head": head})


def make_method_policy(method: Entry, parameters: Mapping[str, object]) -> LossyPolicy:
    """Run a method's recipe. Raises: the recipe's errors, and one line if the result is no policy or breaks the entry's guarantee."""
    policy = make_entry(method, parameters)
    if not isinstance(policy, LossyPolicy) or (method.guarantee == "lossless" and not policy.lossless):
        expected = f"a {'lossless ' if method.guarantee == 'lossless' else ''}LossyPolicy"
        raise TypeError(
            f"the recipe of the method {method.name!r} must return {expected}, it returned {shown(policy)}"
        )
    return policy


def compute_fingerprint(policy: LossyPolicy) -> str:
    """Return the SHA-256 of the JSON form, with heads and profiles identified by content instead of path.

    Raises: `ValueError`, one line, for a part without a name.
    """
    names = {id(item): item.digest for item in policy.saved().values()}
    return hashlib.sha256(json.dumps(policy._spec(names), sort_keys=True).encode()).hexdigest()
