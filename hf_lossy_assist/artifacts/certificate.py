"""Certificates: a bound on the loss of a policy, with the conditions it holds for, and the file in the policy's folder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..validation import one_line, shown
from .files import check_types, format_json, read_object
from .identity import ModelIdentity, doubt_weights


CERTIFICATE = "certificate.json"
SCOPE = "for prompts drawn like these"


@dataclass(frozen=True)
class Certificate:
    """A bound on the loss of a policy, and the conditions that it holds for.

    Args:
        policy: its name. fingerprint: its `policy.fingerprint`, which depends on all settings and heads.
        task: its name, and the file of its problems. problems: number of problems behind the bound; none of them was used in the choice.
        right: number of them that the target answers right. harms, gains: answers that the target has right and the policy wrong, and
            vice versa.
        max_loss: the requested limit. Both the rate of harm and the loss of accuracy are certified not to exceed it. confidence: of that.
        harm_bound, net_bound: upper bounds on both for this setting alone, at its ladder's share. They do not account for the choice among several
            settings, so they certify nothing.
        tried: number of settings tried. speed, of_target: tokens per second, and relative to the target, with `batch_size` prompts at a time.
        models: by role, the `ModelIdentity`, a hash of the weights and their precision. decoding: arguments of `generate`.
        data: SHA-256 of the problems. machine, versions: where speeds were measured.
    """

    policy: str
    fingerprint: str
    task: str
    problems: int
    right: int
    harms: int
    gains: int
    harm_bound: float | int
    net_bound: float | int
    confidence: float | int
    max_loss: float | int
    tried: int
    batch_size: int
    speed: float | int
    of_target: float | int
    models: dict[str, dict[str, str | int | None]]
    decoding: dict[str, bool | int | float]
    data: str
    machine: str
    versions: dict[str, str]
    scope: str = SCOPE

    def __post_init__(self) -> None:
        check_types(self)
        counts = 0 <= self.harms <= self.right <= self.problems and 0 <= self.gains <= self.problems - self.right
        if not counts or not self.harms / max(self.problems, 1) <= self.harm_bound <= self.max_loss <= 1:
            raise ValueError("counts and bounds that contradict each other")
        if not 0 <= self.confidence < 1 or min(self.problems, self.speed, self.of_target) <= 0:
            raise ValueError(f"no confidence, problems or speed: {self.confidence}, {self.problems}, {self.speed}")
        for model in self.models.values():
            _split_model(model)

    def write(self, folder: Path) -> None:
        (folder / CERTIFICATE).write_text(format_json(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Certificate":
        """Read the file written by `write`. Raises: `ValueError`, one line, for other entries, types or impossible values; `OSError`."""
        entries = read_object(folder / CERTIFICATE)
        try:
            return cls(**entries)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{folder / CERTIFICATE}: {one_line(error)}") from None

    def doubts(
        self, models: Mapping[str, PreTrainedModel | None], decoding: Mapping[str, Any], fingerprint: str | None = None
    ) -> list[str]:
        """Return the differences from the run that the certificate is for, one line each.

        `models`: by role, or None. `decoding`: the known arguments of `generate`; a smaller `max_new_tokens` is no difference.
        `fingerprint`: of the policy, if known.
        """
        doubts = []
        if fingerprint not in (None, self.fingerprint):
            doubts.append(f"another policy than {shown(self.policy, 200)}, or another head in it")
        for role, model in models.items():
            if role in self.models and model is None:
                doubts.append(f"no {role} model by itself")
            elif role in self.models:
                here, (there, weights, dtype) = ModelIdentity.of(model), _split_model(self.models[role])
                if what := there.conflict(here) or there.doubt(here) or doubt_weights(weights, dtype, model):
                    doubts.append(f"another {role} ({what})")
        for name, value in decoding.items():
            there = self.decoding.get(name, value)
            if name == "max_new_tokens" and value > there:
                doubts.append(f"texts of up to {there} new tokens there, longer ones here")
            elif name != "max_new_tokens" and value != there:
                doubts.append(f"{name} {shown(there)} there, {shown(value)} here")
        return doubts

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a card's table of figures."""
        certified = f"certified: at most {self.max_loss:.2%} at {self._sure} confidence"
        speed = f"{self.speed:.0f} tokens/s, {self.of_target:.2f} × the target alone, on {self.machine}"
        return [
            ("certified on", f"{self.task}, {self.problems} problems, {self.right} right by the target, {self.scope}"),
            ("harm (right by the target, wrong by this policy)", f"{self.harms} of {self.problems}; {certified}"),
            ("gain (wrong by the target, right by this policy)", f"{self.gains} of {self.problems}"),
            (f"speed at batch size {self.batch_size}", speed),
        ]

    def results(self) -> list[tuple[str, str, object]]:
        """Return the figures for a card's model index: type, name and value."""
        harms = f"right by the target, wrong by this policy; at most {self.max_loss:.2%} at {self._sure} confidence"
        speed = f"speed × the target alone, batch size {self.batch_size}, on {self.machine}"
        return [("harm", harms, self.harms / self.problems), ("speedup", speed, self.of_target)]

    @property
    def _sure(self) -> str:
        return f"{100 * self.confidence:.10g}%"  # 99.9 % must not become 100 %

    def __str__(self) -> str:
        return (
            f"{self.policy}: {self.of_target:.2f} × the target; harms {self.harms} of {self.problems} answers and mends {self.gains}; certified: "
            f"harms at most {self.max_loss:.2%} at {self._sure} confidence, {self.scope}"
        )


def _split_model(record: Mapping[str, object]) -> tuple[ModelIdentity, object, object]:
    """Return a recorded model's identity, the hash of its weights and their precision."""
    identity = {name: value for name, value in record.items() if name not in ("weights", "dtype")}
    return ModelIdentity.from_dict(identity), record.get("weights"), record.get("dtype")
