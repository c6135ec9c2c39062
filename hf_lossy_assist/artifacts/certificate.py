"""What a certificate says, and the file that carries it beside a policy."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..models.identity import ModelIdentity
from ..validation import shown
from .files import json_text, write_text
from .reading import read_object


CERTIFICATE = "certificate.json"
SCOPE = "for prompts drawn like these"


@dataclass(frozen=True)
class Certificate:
    """A bound on what a policy costs, and what it is of.

    Args:
        task: its name, and the file of its problems. problems: how many stand behind the bound; none of them had a part in the choice.
        harms, gains: answers that the target has right and the policy wrong, and the other way round.
        harm_bound: the rate of harm is below it. net_bound: the loss of accuracy is.
        confidence: of each bound by itself, after its share of all settings that were tried.
        max_loss: the limit that was asked for. tried: how many settings were. speed, of_target: tokens per second, and times the target's.
        models: by role, what `ModelIdentity` says and a hash of the weights. decoding: arguments of `generate`.
        data: SHA-256 of the problems. machine, versions: where speeds were measured.
    """

    policy: str
    task: str
    problems: int
    harms: int
    gains: int
    harm_bound: float
    net_bound: float
    confidence: float
    max_loss: float
    tried: int
    speed: float
    of_target: float
    models: Mapping[str, Any]
    decoding: Mapping[str, Any]
    data: str
    machine: str
    versions: Mapping[str, str]
    scope: str = SCOPE

    def write(self, folder: Path) -> None:
        """Write certificate.json."""
        write_text(folder / CERTIFICATE, json_text(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Certificate":
        """What `write` wrote. Raises: `ValueError`, one line, for other entries; `OSError`."""
        file = folder / CERTIFICATE
        found, names = read_object(file, "an object, a certificate"), [f.name for f in fields(cls)]
        if sorted(found) != sorted(names):
            raise ValueError(f"{file}: expected the entries {', '.join(names)}, got {shown(sorted(found), 300)}")
        return cls(**found)

    def doubts(self, models: Mapping[str, Any], decoding: Mapping[str, Any]) -> list[str]:
        """What differs from that which the certificate is of; one line each.

        Args:
            models: by role. decoding: arguments of `generate`; those of sampling count where it samples.
        """
        found = []
        for role, model in models.items():
            known = {name: value for name, value in dict(self.models.get(role, {})).items() if name != "weights"}
            here, there = ModelIdentity.of(model), ModelIdentity.from_dict(known)
            what = there.conflict(here) or there.doubt(here)
            found += [f"another {role} ({what})"] if what else []
        names = ["do_sample"] + (["temperature", "top_k", "top_p"] if self.decoding.get("do_sample") else [])
        for name in names:
            if name in decoding and decoding[name] != self.decoding.get(name):
                found.append(f"{name} {shown(self.decoding.get(name))} there, {shown(decoding[name])} here")
        return found

    def rows(self) -> list[tuple[str, str]]:
        """Lines of a card's table of figures."""
        return [
            ("certified on", f"{self.task}, {self.problems} problems, {self.scope}"),
            (
                "harm (right by the target, wrong by this policy)",
                f"{self.harms} of {self.problems}; at most {self.harm_bound:.2%} at {self.confidence:.0%} confidence",
            ),
            ("net loss of accuracy", f"at most {self.net_bound:.2%} at {self.confidence:.0%} confidence"),
            ("speed", f"{self.speed:.0f} tokens/s, {self.of_target:.2f} × the target alone, on {self.machine}"),
        ]

    def __str__(self) -> str:
        return (
            f"{self.policy}: {self.of_target:.2f} × the target; harms {self.harms} of {self.problems} answers, at most {self.harm_bound:.2%} "
            f"at {self.confidence:.0%} confidence (net at most {self.net_bound:.2%}), {self.scope}"
        )
