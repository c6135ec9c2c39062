"""Profiles for SV: the tables of `profile_tables` with their models, settings and machine, in profile.json and profile.safetensors."""

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from huggingface_hub import ModelCard
from safetensors import SafetensorError

from ..validation import check_int, nearest, one_line, shown
from .cards import TEMPLATES, escape, format_loading, make_data, make_results, save_card, select_metrics
from .conditions import describe_machine
from .files import check_readable, format_json, new_folder
from .hub import AGAIN, fetch
from .identity import ModelIdentity, tokenizer_hash
from .json_io import JSONObject, read_json, read_whole
from .profile_tables import Bins, Latency


PROFILE, TABLES = "profile.json", "profile.safetensors"
MODELS = ("target", "draft", "companion")
LONGEST_PROFILED = 128  # tokens per round: the cost of a round is computed for each number of verified tokens
FASTEST = 1e6  # largest accepted speed, relative to strict acceptance
# The other entries of profile.json, and their JSON types.
FACTS = {"gamma": int, **dict.fromkeys(("tokenizer_hash", "machine", "tables_sha256"), str)}
FACTS |= dict.fromkeys(("decoding", "training", "metrics", "versions"), dict)


@dataclass(eq=False, repr=False)
class Profile:
    """Tables by which `SVFilter` decides. Made by `hf-lossy profile`, loaded by `Profile.from_pretrained`.

    `gamma` is the longest draft that was profiled, `decoding` the sampling settings of the distributions, `machine` where the seconds were
    measured, `pays[i]` the predicted speed relative to strict acceptance at `latency.batches[i]` rows (1.1: ten percent faster).
    """

    bins: Bins
    latency: Latency
    gamma: int
    pays: np.ndarray  # (N,) float64
    target: ModelIdentity
    draft: ModelIdentity
    companion: ModelIdentity
    tokenizer_hash: str
    decoding: dict[str, object]
    machine: str
    training: dict[str, object] = field(default_factory=dict)
    metrics: JSONObject = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    source: str | None = None  # where it was loaded from or saved to: its name in a policy's JSON form

    def __post_init__(self) -> None:
        check_int("gamma", self.gamma, 1, LONGEST_PROFILED)
        if self.pays.shape != self.latency.batches.shape or not np.isfinite(self.pays).all():
            raise ValueError("the predicted speeds have gaps: make the profile again (hf-lossy profile)")
        if (self.pays < 0).any() or (self.pays > FASTEST).any():
            raise ValueError(
                f"the predicted speeds go from {self.pays.min():.3g} to {self.pays.max():.3g} times that of strict acceptance, "
                f"expected 0 to {FASTEST:g}: make the profile again (hf-lossy profile)"
            )
        if (self.latency.tokens[:, -1] != self.gamma * self.latency.batches).any():
            raise ValueError(
                f"the latency table was not measured up to γ = {self.gamma} tokens a row, where the profile's drafts end: measure it "
                "again (hf-lossy profile)"
            )

    def __repr__(self) -> str:  # one line: the name in a policy if it was never saved
        return f"Profile({self.source or 'never saved'}, γ = {self.gamma}, {self.target.id} and {self.draft.id})"

    def __eq__(self, other: object) -> bool:
        """Compare by content, not by source: a policy equals the one built from its JSON form."""
        return isinstance(other, Profile) and (self is other or self._content() == other._content())

    def __hash__(self) -> int:
        return hash((self.gamma, self.target, self.draft, self.companion, self.pays.tobytes()))

    def _content(self) -> tuple[object, ...]:
        tables = [getattr(part, f.name) for part in (self.bins, self.latency) for f in dataclasses.fields(part)]
        facts = (self.target, self.draft, self.companion, self.gamma, self.tokenizer_hash, self.decoding, self.machine)
        return (*facts, [table.tolist() for table in (self.pays, *tables)])

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(repr(self._content()).encode()).hexdigest()

    def worthwhile(self, batch: int) -> bool:
        """Return whether a companion is expected to pay for itself with this number of rows, by more than the noise of the seconds."""
        return bool(np.interp(batch, self.latency.batches, self.pays - self.latency.noise) > 1.0)

    def check(self, target: Any, draft: Any, companion: Any, tokenizer: Any = None) -> None:
        """Refuse models that this profile is not for; warn of another id, revision or machine. `companion` None: it is not used."""
        for name, model in zip(MODELS, (target, draft, companion), strict=True):
            if model is None:
                continue
            recorded, given = getattr(self, name), ModelIdentity.of(model)
            instead = "Use the models it names, or make one for these (hf-lossy profile)"
            recorded.check(given, name, "the profile", "this profile was made", instead)
        if tokenizer is not None and tokenizer_hash(tokenizer) != self.tokenizer_hash:
            raise ValueError(
                "this profile was made with another tokenizer: token ids mean other words (hf-lossy profile)"
            )
        here = describe_machine(target.device)
        if here != self.machine:
            warnings.warn(
                f"the profile's seconds were taken on another machine ({one_line(self.machine)}; this is {here}): what pays may differ",
                stacklevel=3,
            )

    def check_length(self, longest: int) -> None:
        """Refuse drafts with more tokens than were profiled."""
        if longest > self.gamma:
            raise ValueError(
                f"this profile was made with drafts of up to {self.gamma} tokens, and up to {longest} may be drafted here: draft "
                f"less (gamma, num_assistant_tokens or the policy's stop), or profile more (hf-lossy profile --gamma {longest})"
            )

    def check_decoding(self, decoding: Mapping[str, object]) -> None:
        """Warn if a call's sampling settings differ from the profile's, in which case P̂ is a guess."""
        known = {name: value for name, value in decoding.items() if name in self.decoding}
        differs = [
            f"{k} {shown(self.decoding[k])} there, {shown(v)} here" for k, v in known.items() if self.decoding[k] != v
        ]
        if differs:
            warnings.warn(
                f"this profile was made with other sampling settings ({', '.join(differs)}): what it expects may be wrong, and the "
                "speed with it; the output's distribution is not affected. Make one for these (hf-lossy profile)",
                stacklevel=3,
            )

    def write(self, folder: Path) -> None:
        """Write only profile.json and profile.safetensors. Raises: `ValueError`, one line, if `from_pretrained` would refuse them."""
        parts: dict[str, Bins | Latency] = {"bins": self.bins, "latency": self.latency}
        tables = {
            f"{name}.{f.name}": getattr(part, f.name) for name, part in parts.items() for f in dataclasses.fields(part)
        }
        data = safetensors.numpy.save({"pays": self.pays} | tables)
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("bins", "latency", "pays", "source")]
        facts = {name: getattr(self, name) for name in names} | {
            name: getattr(self, name).to_dict() for name in MODELS
        }
        facts["tables_sha256"] = hashlib.sha256(data).hexdigest()
        with check_readable("this profile", folder):
            (folder / TABLES).write_bytes(data)
            (folder / PROFILE).write_text(format_json(facts), encoding="utf-8")
            Profile.from_pretrained(folder)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write profile.json, profile.safetensors and README.md into a folder, all or nothing. A user's README.md there is kept."""
        with new_folder(save_directory) as folder:
            self.write(folder)
            save_card(profile_card(self), folder, Path(save_directory))
        self.source = str(save_directory)

    @classmethod
    def from_pretrained(cls, source: str | Path, **kwargs: Any) -> "Profile":
        """Load a profile from a folder or from the Hub (`org/name`, `org/name@revision`).

        Raises: `ValueError`, one line, for files that are missing or damaged, or have tables with gaps.
        """
        facts_file, tables_file = fetch(str(source), (PROFILE, TABLES), **kwargs)
        facts = _read_facts(facts_file)
        data = read_whole(tables_file)
        if hashlib.sha256(data).hexdigest() != facts.pop("tables_sha256"):
            raise ValueError(
                f"{tables_file} is not the file that {PROFILE} was saved with (SHA-256 differs): save it again, or download it again ({AGAIN})"
            )
        tables = _read_tables(data, tables_file)
        try:
            bins = Bins(**{f.name: tables[f"bins.{f.name}"] for f in dataclasses.fields(Bins)})
            latency = Latency(**{f.name: tables[f"latency.{f.name}"] for f in dataclasses.fields(Latency)})
            made = cls(bins=bins, latency=latency, pays=tables["pays"], **facts, source=str(source))
        except ValueError as error:
            raise ValueError(f"{tables_file}: {error}") from None
        if not latency.convex:
            warnings.warn(
                f"{tables_file}: the seconds flatten as more tokens are verified, as in profiles of before 2026-11-27: SV may verify "
                "fewer tokens than is best; what it writes is right. Make the profile again (hf-lossy profile)",
                stacklevel=2,
            )
        return made


COUNTED = ("bins.counts", "latency.batches", "latency.tokens")  # int64; the other tables are float32 or float64


def _read_tables(data: bytes, file: Path) -> dict[str, np.ndarray]:
    """Return every table of profile.safetensors, with its dtype checked."""
    try:
        tables: dict[str, np.ndarray] = safetensors.numpy.load(data)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}): download it again ({AGAIN})") from None
    except KeyError as error:  # a dtype that numpy does not have
        raise ValueError(f"{file}: a table of dtype {error.args[0]}; expected F32, F64 or I64") from None
    parts = {"bins": Bins, "latency": Latency}
    for name in ("pays", *(f"{part}.{f.name}" for part, kind in parts.items() for f in dataclasses.fields(kind))):
        if name not in tables:
            raise ValueError(f"{file} has no table {name!r}: make the profile again (hf-lossy profile)")
        expected = ("int64",) if name in COUNTED else ("float32", "float64")
        if tables[name].dtype.name not in expected:
            raise ValueError(f"{file}: {name}: expected {' or '.join(expected)}, got {tables[name].dtype.name}")
    return tables


def _read_facts(file: Path) -> JSONObject:
    """Return every entry of profile.json, with its type checked."""
    facts = read_json(file)
    kinds = dict.fromkeys(MODELS, dict) | FACTS
    if not isinstance(facts, dict):
        raise ValueError(f"{file} is no profile: expected an object with {', '.join(kinds)}, got {shown(facts)}")
    for name in facts:
        if name not in kinds:
            raise ValueError(f"{file}: {nearest('entry', name, kinds)}")
    for name, kind in kinds.items():
        if name not in facts:
            raise ValueError(f"{file} has no entry {name!r}: make the profile again (hf-lossy profile)")
        if type(facts[name]) is not kind:
            raise ValueError(f"{file}: {name}: expected {_JSON[kind]}, got {shown(facts[name])}")
    for name in MODELS:
        try:
            facts[name] = ModelIdentity.from_dict(facts[name])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: {name}: {error}") from None
    return facts


_JSON = {int: "a whole number", str: "a text", dict: "an object"}


def profile_card(profile: Profile, plots: Sequence[str] = ()) -> ModelCard:
    """Return the card of an SV profile. `plots`: names of image files in the same folder."""
    models = {role: getattr(profile, role) for role in ("target", "draft", "companion")}
    metrics = select_metrics(profile.metrics)
    figures = [
        ("accuracy", "drafted tokens accepted, strict", metrics.get("acceptance")),
        ("pearsonr", "correlation of S with the agreement of draft and target", metrics.get("correlation")),
    ]
    for row in metrics.get("information", [])[-1:]:
        figures.append(("information_gain", "information gain of S and A, bits", row["gain"]))
    source = str(profile.training.get("source") or "held-out prompts")
    return ModelCard.from_template(
        make_data([*models.values()], "sv", **make_results("sv profile", source, figures)),
        template_path=str(TEMPLATES / "profile.md"),
        models=escape(models),
        loaded={role: format_loading(model, role.upper()) for role, model in models.items()},
        gamma=profile.gamma,
        rows=[
            *zip(profile.latency.batches.tolist(), profile.pays.tolist(), profile.latency.noise.tolist(), strict=True)
        ],
        tokenizer_hash=escape(profile.tokenizer_hash),
        machine=escape(profile.machine),
        decoding=", ".join(f"{name} {value}" for name, value in escape(profile.decoding).items()) or "not recorded",
        training=escape(profile.training),
        metrics=escape(metrics),
        plots=list(plots),
        versions=", ".join(f"{name} {version}" for name, version in escape(profile.versions).items()),
    )
