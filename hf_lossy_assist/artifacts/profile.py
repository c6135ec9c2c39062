"""What SV knows before it starts: how often the target accepts a token of given S and A, and what verifying costs on this machine.

Kim et al., "Speculative Verification" (huggingface.co/papers/2509.24328). S = Σ min(q, c) is how much draft and companion agree at a
position, A = min(1, c(x)/q(x)) how readily the companion would accept the drafted token (§4.2). A profile is profile.json and
profile.safetensors, made by `hf-lossy profile`.
"""

import dataclasses
import hashlib
import json
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError

from ..models.identity import ModelIdentity, tokenizer_hash
from ..validation import check_int, nearest, shown
from .files import new_folder
from .hub import AGAIN, fetch
from .reading import read_json, read_whole


PROFILE, TABLES = "profile.json", "profile.safetensors"
MODELS = ("target", "draft", "companion")
LONGEST_PROFILED = (
    128  # tokens a round: what a round is expected to cost is worked out for each number of verified tokens
)
# The other entries of profile.json, and how JSON has them.
FACTS = {
    "gamma": int, "tokenizer_hash": str, "decoding": dict, "machine": str, "training": dict, "metrics": dict, "versions": dict,
    "tables_sha256": str,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Bins:
    """P̂(accept | S, A): cells of S, and in each of them cells of A of its own."""

    s_edges: np.ndarray  # (K − 1,) float32     inner edges of the cells of S, not decreasing
    a_edges: np.ndarray  # (K, L − 1) float32   inner edges of the cells of A for each cell of S
    accept: np.ndarray  # (K, L) float64      mean min(1, p/q), smoothed, not decreasing along A
    accept_by_s: np.ndarray  # (K,) float64       the same without A
    counts: np.ndarray  # (K, L) int64       samples of each cell

    def __post_init__(self) -> None:
        tables = (self.s_edges, self.a_edges, self.accept, self.accept_by_s, self.counts)
        shape = k, m = self.s_edges.size + 1, (self.a_edges.shape[-1] if self.a_edges.ndim else 0) + 1
        fits = [x.shape for x in tables] == [(k - 1,), (k, m - 1), shape, (k,), shape]
        if not fits or not all(np.isfinite(x).all() for x in tables):
            raise ValueError("the tables of acceptance have gaps: make the profile again (hf-lossy profile)")
        if not all((np.diff(x) >= 0).all() for x in tables[:3]):
            raise ValueError("the tables of acceptance are out of order: make the profile again (hf-lossy profile)")
        if any((x < 0).any() or not (x <= 1).all() for x in (self.accept, self.accept_by_s)):
            raise ValueError(
                "the tables of acceptance hold what is no probability: make the profile again (hf-lossy profile)"
            )

    def of_s(self, s: torch.Tensor) -> torch.Tensor:
        """The cell of S of each position, int64."""
        return torch.bucketize(s, self._edges(s.device)[0], right=True)

    def of_a(self, s_cell: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """The cell of A, int64: `a` (…, N) of positions whose cell of S is `s_cell` (…)."""
        edges = self._edges(a.device)[1][s_cell]  # (…, L − 1)
        return torch.searchsorted(edges, a.contiguous(), right=True)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`accept_by_s` (K,) and `accept` (K, L) on a device, float64."""
        key = device, "tables"
        if key not in self._on:
            self._on[key] = torch.from_numpy(self.accept_by_s).to(device), torch.from_numpy(self.accept).to(device)
        return self._on[key]

    def _edges(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        key = device, "edges"
        if key not in self._on:
            self._on[key] = torch.from_numpy(self.s_edges).to(device), torch.from_numpy(self.a_edges).to(device)
        return self._on[key]

    @cached_property
    def _on(self) -> dict[tuple[torch.device, str], tuple[torch.Tensor, torch.Tensor]]:
        return {}


@dataclass(frozen=True, eq=False)
class Latency:
    """Seconds of one round, measured: target forward, acceptance and bookkeeping; one draft step; what the companion adds.

    `seconds[i][k]` is for `batches[i]` rows and `tokens[i][k]` drafted tokens verified in all of them together.
    """

    batches: np.ndarray  # (N,) int64, rising
    tokens: np.ndarray  # (N, M) int64, rising from 0 to γ · batch
    seconds: np.ndarray  # (N, M) float64, not falling
    step: np.ndarray  # (N,) float64   drafting one token a row
    companion: np.ndarray  # (N,) float64   what a round costs more with the companion
    noise: np.ndarray  # (N,) float64   half the range between quartiles, of the median

    def __post_init__(self) -> None:
        lists, tables = (self.batches, self.step, self.companion, self.noise), (self.tokens, self.seconds)
        fits = all(x.shape == (self.batches.size,) for x in lists) and self.tokens.shape == self.seconds.shape
        fits = fits and self.tokens.ndim == 2 and self.tokens.shape[0] == self.batches.size > 0 < self.tokens.shape[1]
        if not fits or not all(np.isfinite(values).all() for values in (*lists, *tables)):
            raise ValueError("the latency table has gaps: measure it again (hf-lossy profile)")
        rising = (np.diff(self.batches) > 0).all() and (np.diff(self.tokens, axis=1) > 0).all() and self.batches[0] > 0
        falling = (np.diff(self.seconds, axis=1) < 0).any() or (self.seconds[:, 0] <= 0).any()
        if not rising or falling or (self.tokens[:, 0] != 0).any() or min(self.step.min(), self.companion.min()) < 0:
            raise ValueError("the latency table is out of order: measure it again (hf-lossy profile)")

    def of(self, batch: int, gamma: int) -> np.ndarray:
        """Seconds of a round of `batch` rows that drafts and then verifies 0, 1, … `batch`·`gamma` tokens, float64.

        Between measured batch sizes on the line through both; beyond them as at the nearest, in proportion to the rows.
        """
        per_row = np.arange(batch * gamma + 1) / batch  # tokens verified for each row
        curves = np.stack([
            np.interp(per_row, m / b, s) for b, m, s in zip(self.batches, self.tokens, self.seconds, strict=True)
        ])  # fmt: skip
        return self._between(batch, curves + (self.companion + gamma * self.step)[:, None])

    def unobserved(self, batch: int, gamma: int) -> float:
        """Seconds of a round that asks no companion and verifies all of its γ tokens a row."""
        return float(self.of(batch, gamma)[-1] - self._between(batch, self.companion))

    def _between(self, batch: int, values: np.ndarray) -> np.ndarray:
        """(N, …) → (…)."""
        if (
            not self.batches[0] < batch < self.batches[-1]
        ):  # a line drawn on could fall below what was measured, or below 0
            nearest = 0 if batch <= self.batches[0] else -1
            return values[nearest] * batch / self.batches[nearest]
        i = int(np.searchsorted(self.batches, batch))
        low, high = self.batches[i - 1], self.batches[i]
        share = (batch - low) / (high - low)
        return values[i - 1] + share * (values[i] - values[i - 1])


@dataclass(eq=False, repr=False)
class Profile:
    """What `SpeculativeVerification` decides by. Made by `hf-lossy profile`, loaded by `Profile.from_pretrained`.

    `gamma` is the longest draft that was profiled, `decoding` the sampling settings of the laws, `machine` where the seconds were
    taken, `pays[i]` the predicted speed against strict acceptance at `latency.batches[i]` rows (1.1: a tenth faster).
    """

    bins: Bins
    latency: Latency
    gamma: int
    pays: np.ndarray  # (N,) float64
    target: ModelIdentity
    draft: ModelIdentity
    companion: ModelIdentity
    tokenizer_hash: str
    decoding: dict[str, Any]
    machine: str
    training: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    source: str | None = None  # where it was loaded from or saved to: its name in a policy's JSON form

    def __post_init__(self) -> None:
        check_int("gamma", self.gamma, 1, LONGEST_PROFILED)
        if self.pays.shape != self.latency.batches.shape or not np.isfinite(self.pays).all():
            raise ValueError("the predicted speeds have gaps: make the profile again (hf-lossy profile)")
        if (self.latency.tokens[:, -1] < self.gamma * self.latency.batches).any():
            raise ValueError(
                f"the latency table has gaps: it ends before all of γ = {self.gamma} tokens a row are verified: measure it again "
                "(hf-lossy profile)"
            )

    def __repr__(self) -> str:  # in one line: a policy's name where it was never saved
        return f"Profile({self.source or 'never saved'}, γ = {self.gamma}, {self.target.id} and {self.draft.id})"

    def __eq__(self, other: object) -> bool:
        """By content, not by where it came from: a policy equals what its JSON form builds."""
        return isinstance(other, Profile) and (self is other or self._content() == other._content())

    def __hash__(self) -> int:
        return hash((self.gamma, self.target, self.draft, self.companion, self.pays.tobytes()))

    def _content(self) -> tuple[Any, ...]:
        tables = [
            self.pays,
            *(getattr(part, f.name) for part in (self.bins, self.latency) for f in dataclasses.fields(part)),
        ]
        models = (self.target, self.draft, self.companion)
        return (
            *models,
            self.gamma,
            self.tokenizer_hash,
            self.decoding,
            self.machine,
            [table.tolist() for table in tables],
        )

    def worthwhile(self, batch: int) -> bool:
        """Whether a companion is expected to pay for itself with so many rows, by more than the noise of the seconds."""
        gain = self.pays - self.latency.noise
        return bool(np.interp(batch, self.latency.batches, gain) > 1.0)

    def check(self, target: Any, draft: Any, companion: Any, tokenizer: Any = None) -> None:
        """Refuse models that this profile is not of; warn of another id, revision or machine. `companion` None: it is not used."""
        for name, model in zip(MODELS, (target, draft, companion), strict=True):
            if model is None:
                continue
            recorded, given = getattr(self, name), ModelIdentity.of(model)
            conflict, doubt = recorded.conflict(given), recorded.doubt(given)
            if conflict is not None:
                raise ValueError(
                    f"this profile was made with the {name} {recorded}, and the {name} here is {given}: {conflict}. "
                    "Use the models it names, or make one for these (hf-lossy profile)"
                )
            if doubt is not None:
                warnings.warn(f"the profile's {name} and this {name} may differ: {doubt}", stacklevel=3)
        if tokenizer is not None and tokenizer_hash(tokenizer) != self.tokenizer_hash:
            raise ValueError(
                "this profile was made with another tokenizer: token ids mean other words (hf-lossy profile)"
            )
        here = machine(target.device)
        if here != self.machine:
            warnings.warn(
                f"the profile's seconds were taken on another machine ({self.machine}; this is {here}): what pays may differ",
                stacklevel=3,
            )

    def check_length(self, longest: int) -> None:
        """Refuse drafts of more tokens than were profiled."""
        if longest > self.gamma:
            raise ValueError(
                f"this profile was made with drafts of up to {self.gamma} tokens, and up to {longest} may be drafted here: draft "
                f"less (gamma, num_assistant_tokens or the policy's stop), or profile more (hf-lossy profile --gamma {longest})"
            )

    def check_decoding(self, decoding: Mapping[str, Any]) -> None:
        """Warn where a call samples otherwise than the profile was made with: P̂ is then a guess."""
        differs = [
            f"{k} {self.decoding[k]!r} there, {v!r} here"
            for k, v in decoding.items()
            if k in self.decoding and self.decoding[k] != v
        ]
        if differs:
            warnings.warn(
                f"this profile was made with other sampling settings ({', '.join(differs)}): what it expects may be wrong, and the "
                "speed with it; the output's law is not affected. Make one for these (hf-lossy profile)",
                stacklevel=3,
            )

    # -- files --------------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """profile.json and profile.safetensors alone."""
        tables = {f"bins.{f.name}": getattr(self.bins, f.name) for f in dataclasses.fields(Bins)}
        tables |= {f"latency.{f.name}": getattr(self.latency, f.name) for f in dataclasses.fields(Latency)}
        data = safetensors.numpy.save({"pays": self.pays} | tables)
        (folder / TABLES).write_bytes(data)
        facts = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("bins", "latency", "pays", "source")
        }
        facts |= {name: facts[name].to_dict() for name in MODELS}
        facts["tables_sha256"] = hashlib.sha256(data).hexdigest()
        (folder / PROFILE).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the profile into a folder, all or nothing."""
        with new_folder(save_directory) as folder:
            self.write(folder)
        self.source = str(save_directory)

    @classmethod
    def from_pretrained(cls, source: str | Path, **kwargs: Any) -> "Profile":
        """Load a profile from a folder or from the Hub (`org/name`, `org/name@revision`).

        Raises: `ValueError`, one line, for files that are missing, damaged, or hold tables with gaps.
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
            return cls(bins=bins, latency=latency, pays=tables["pays"], **facts, source=str(source))
        except ValueError as error:
            raise ValueError(f"{tables_file}: {error}") from None


COUNTED = ("bins.counts", "latency.batches", "latency.tokens")  # int64; the other tables are float32 or float64


def _read_tables(data: bytes, file: Path) -> dict[str, np.ndarray]:
    """Every table of profile.safetensors, each of a dtype that it may have been saved with."""
    try:
        tables: dict[str, np.ndarray] = safetensors.numpy.load(data)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}): download it again ({AGAIN})") from None
    except KeyError as error:  # that numpy does not have
        raise ValueError(f"{file}: a table of dtype {error.args[0]}; expected F32, F64 or I64") from None
    parts = {"bins": Bins, "latency": Latency}
    for name in ("pays", *(f"{part}.{f.name}" for part, kind in parts.items() for f in dataclasses.fields(kind))):
        if name not in tables:
            raise ValueError(f"{file} has no table {name!r}: make the profile again (hf-lossy profile)")
        expected = ("int64",) if name in COUNTED else ("float32", "float64")
        if tables[name].dtype.name not in expected:
            raise ValueError(f"{file}: {name}: expected {' or '.join(expected)}, got {tables[name].dtype.name}")
    return tables


def _read_facts(file: Path) -> dict[str, Any]:
    """Every entry of profile.json, of the type that it was saved with."""
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


def machine(device: torch.device) -> str:
    """Where seconds are taken: the GPU, or the processor and how many threads torch has."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


@cache
def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
