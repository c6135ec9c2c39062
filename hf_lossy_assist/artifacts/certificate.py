"""Certificates: a bound on the loss of a policy, with the conditions it holds for, and the file in the policy's folder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..validation import check_int, check_number, check_positive, shown
from .files import format_json, write_text
from .identity import ModelIdentity, doubt_weights
from .json_io import JSONObject, read_object


CERTIFICATE = "certificate.json"
SCOPE = "for prompts drawn like these"
LONGEST = 10_000  # characters of a text in a certificate
OF_WEIGHTS = ("weights", "dtype")  # what is recorded of a model besides its identity


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
    harm_bound: float
    net_bound: float
    confidence: float
    max_loss: float
    tried: int
    batch_size: int
    speed: float
    of_target: float
    models: Mapping[str, Mapping[str, str]]
    decoding: Mapping[str, bool | int | float]
    data: str
    machine: str
    versions: Mapping[str, str]
    scope: str = SCOPE

    def write(self, folder: Path) -> None:
        write_text(folder / CERTIFICATE, format_json(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Certificate":
        """Read the file written by `write`. Raises: `ValueError`, one line, for other entries, types or impossible values; `OSError`."""
        file = folder / CERTIFICATE
        found, names = read_object(file, "an object, a certificate"), [f.name for f in fields(cls)]
        if sorted(found) != sorted(names):
            raise ValueError(f"{file}: expected the entries {', '.join(names)}, got {shown(sorted(found), 300)}")
        try:
            _check(found)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from None
        return cls(**found)

    def doubts(
        self,
        models: Mapping[str, PreTrainedModel | None],
        decoding: Mapping[str, Any],
        fingerprint: str | None = None,
    ) -> list[str]:
        """Return the differences from the run that the certificate is for, one line each.

        `models`: by role, or None. `decoding`: the known arguments of `generate`; a smaller `max_new_tokens` is no difference.
        `fingerprint`: of the policy, if known.
        """
        found = []
        if fingerprint not in (None, self.fingerprint):
            found.append(f"another policy than {shown(self.policy, 200)}, or another head in it")
        for role, model in models.items():
            found += self._doubts_of(role, model)
        for name, here in decoding.items():
            if name not in self.decoding:
                continue
            there = self.decoding[name]
            if name == "max_new_tokens":
                found += [f"texts of up to {there} new tokens there, longer ones here"] if here > there else []
            elif here != there:
                found.append(f"{name} {shown(there)} there, {shown(here)} here")
        return found

    def _doubts_of(self, role: str, model: PreTrainedModel | None) -> list[str]:
        if role not in self.models:
            return []
        known = dict(self.models[role])
        weights, dtype = (known.pop(name, None) for name in OF_WEIGHTS)
        if model is None:
            return [f"no {role} model by itself"]
        here, there = ModelIdentity.of(model), ModelIdentity.from_dict(known)
        what = there.conflict(here) or there.doubt(here) or doubt_weights(weights, dtype, model)
        return [f"another {role} ({what})"] if what else []

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

    def results(self) -> list[tuple[str, str, float | None]]:
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


def write_certificate(certificate: Certificate | None, folder: Path, goal: Path) -> None:
    """Write a policy's certificate into `folder`, whose files will replace those in `goal`; without one, remove an older certificate from `goal`."""
    if certificate is None:
        (goal / CERTIFICATE).unlink(missing_ok=True)
    else:
        certificate.write(folder)


def _check(found: JSONObject) -> None:
    """Refuse contents that no search writes, since a file from the Hub may have any. Raises: `TypeError` or `ValueError`, one line."""
    for name in ("policy", "fingerprint", "task", "data", "machine", "scope"):
        _check_text(name, found[name])
    for name in ("problems", "tried", "batch_size"):
        check_int(name, found[name], 1)
    check_int("right", found["right"], 0, found["problems"])
    check_int("harms", found["harms"], 0, found["right"])
    check_int("gains", found["gains"], 0, found["problems"] - found["right"])
    check_number("harm_bound", found["harm_bound"], found["harms"] / found["problems"], 1.0)
    check_number("net_bound", found["net_bound"], -1.0, 1.0)
    check_number("confidence", found["confidence"], 0.0, 1 - 1e-9)
    check_number("max_loss", found["max_loss"], found["harm_bound"], 1.0)
    check_positive("speed", found["speed"])
    check_positive("of_target", found["of_target"])
    for name in ("models", "decoding", "versions"):
        if not isinstance(found[name], Mapping):
            raise TypeError(f"{name}: expected an object, got {shown(found[name])}")
    for role, model in found["models"].items():
        if not isinstance(model, Mapping):
            raise TypeError(f"models: {shown(role)}: expected an object, got {shown(model)}")
        for name in OF_WEIGHTS:
            _check_text(f"models: {shown(role)}: {name}", model.get(name))
        ModelIdentity.from_dict({name: value for name, value in model.items() if name not in OF_WEIGHTS})
    for name, value in found["decoding"].items():
        if not isinstance(value, bool | int | float):
            raise TypeError(f"decoding: {shown(name)}: expected a number, true or false, got {shown(value)}")
    for name, value in found["versions"].items():
        _check_text(f"versions: {shown(name)}", value)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > LONGEST:
        raise TypeError(f"{name}: expected a text of at most {LONGEST} characters, got {shown(value)}")
