"""Profiles for SV: the tables of `profile_tables` with their models, settings and machine, in profile.json and profile.safetensors."""

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from huggingface_hub import ModelCard

from ..validation import check_int, one_line, shown
from .artifact import TensorArtifact
from .cards import Figure, render
from .conditions import describe_machine
from .files import JSONObject, check_types
from .identity import ModelIdentity, check_tokenizer
from .profile_tables import Bins, Latency


PROFILE, TABLES = "profile.json", "profile.safetensors"
MODELS = ("target", "draft", "companion")
TABLES_OF_ROUNDS: dict[str, Any] = {"bins": Bins, "latency": Latency}
LONGEST_PROFILED = 128  # tokens per round: the cost of a round is computed for each number of verified tokens


@dataclass(eq=False, repr=False)
class Profile(TensorArtifact):
    """Tables by which `SVFilter` decides. Made by `hf-lossy profile`, loaded by `Profile.from_pretrained`.

    `gamma` is the longest draft that was profiled, `decoding` the sampling settings of the distributions, `machine` where the seconds were
    measured, `pays[i]` the predicted speed relative to strict acceptance at `latency.batches[i]` rows (1.1: ten percent faster).
    """

    kind = "profile"
    facts_file, tensors_file, checksum = PROFILE, TABLES, "tables_sha256"

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
        check_types(self)
        check_int("gamma", self.gamma, 1, LONGEST_PROFILED)
        if self.pays.shape != self.latency.batches.shape or not np.isfinite(self.pays).all():
            raise ValueError("the predicted speeds have gaps: make the profile again (hf-lossy profile)")
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
        facts = (self.target, self.draft, self.companion, self.gamma, self.tokenizer_hash, self.decoding, self.machine)
        return (*facts, [table.tolist() for table in self.tensors().values()])

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(repr(self._content()).encode()).hexdigest()

    def worthwhile(self, batch: int) -> bool:
        """Return whether a companion is expected to pay for itself with this number of rows, by more than the noise of the seconds."""
        return bool(np.interp(batch, self.latency.batches, self.pays - self.latency.noise) > 1.0)

    def check(self, target: Any, draft: Any, companion: Any, tokenizer: Any = None) -> None:
        """Refuse models that this profile is not for; warn of another id, revision or machine. `companion` None: it is not used."""
        instead = "make one for these (hf-lossy profile)"
        for name, model in zip(MODELS, (target, draft, companion), strict=True):
            if model is not None:
                getattr(self, name).check(model, name, "the profile", instead)
        check_tokenizer(tokenizer, self.tokenizer_hash, "the profile", instead)
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
        differs = [
            f"{name} {shown(self.decoding[name])} there, {shown(value)} here"
            for name, value in decoding.items()
            if self.decoding.get(name, value) != value
        ]
        if differs:
            warnings.warn(
                f"this profile was made with other sampling settings ({', '.join(differs)}): what it expects may be wrong, and the "
                "speed with it; the output's distribution is not affected. Make one for these (hf-lossy profile)",
                stacklevel=3,
            )

    def facts(self) -> JSONObject:
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("bins", "latency", "pays", "source")]
        models = {name: getattr(self, name).to_dict() for name in MODELS}
        return {name: getattr(self, name) for name in names} | models

    def tensors(self) -> dict[str, torch.Tensor]:
        tables = {"pays": self.pays}
        for name, kind in TABLES_OF_ROUNDS.items():
            tables |= {f"{name}.{f.name}": getattr(getattr(self, name), f.name) for f in dataclasses.fields(kind)}
        return {name: torch.from_numpy(table).contiguous() for name, table in tables.items()}

    def card(self, plots: Sequence[str] = ()) -> ModelCard:
        """Return the README.md of this profile. `plots`: names of image files in the same folder."""
        metrics, latency = self.metrics, self.latency
        figures: list[Figure] = [
            ("accuracy", "drafted tokens accepted, strict", metrics.get("acceptance")),
            ("pearsonr", "correlation of S with the agreement of draft and target", metrics.get("correlation")),
        ]
        for row in metrics.get("information", [])[-1:]:
            figures.append(("information_gain", "information gain of S and A, bits", row["gain"]))
        results = "sv profile", str(self.training.get("source") or "held-out prompts"), figures
        rows = zip(latency.batches.tolist(), self.pays.tolist(), latency.noise.tolist(), strict=True)
        models = (self.target, self.draft, self.companion)
        return render("profile.md", models, "sv", results, p=self, rows=list(rows), plots=plots)

    @classmethod
    def build(cls, facts: JSONObject, tensors: Mapping[str, torch.Tensor], where: str) -> "Profile":
        tables = {name: tensor.numpy() for name, tensor in tensors.items()}
        bins, latency = (
            kind(**{f.name: tables[f"{name}.{f.name}"] for f in dataclasses.fields(kind)})
            for name, kind in TABLES_OF_ROUNDS.items()
        )
        models = {name: ModelIdentity.from_dict(facts[name]) for name in MODELS}
        profile = cls(bins=bins, latency=latency, pays=tables["pays"], **facts | models)
        if not latency.convex:
            warnings.warn(
                f"{where}: the seconds flatten as more tokens are verified, as in profiles of before 2026-11-27: SV may verify "
                "fewer tokens than is best; what it writes is right. Make the profile again (hf-lossy profile)",
                stacklevel=3,
            )
        return profile
