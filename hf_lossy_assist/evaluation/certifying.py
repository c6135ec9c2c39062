"""The certificate of a search's outcome."""

from collections.abc import Mapping
from typing import Any

from ..artifacts.certificate import Certificate
from ..policy.policy import compute_fingerprint
from ..policy.short_form import strip_paths
from .arms import TARGET
from .ladders import Field
from .tuning import Search, Tuned


def certificate_of(
    found: Tuned, field: Field, search: Search, facts: Mapping[str, Any], decoding: Mapping[str, Any]
) -> Certificate | None:
    """What stands for the setting that was chosen; None where none was.

    Args:
        facts: of the run, as its record has them. decoding: of all arms.
    """
    best = found.best
    if best is None:
        return None
    its, target = (next(its for its in found.certified if its.arm == name) for name in (best.step.name, TARGET))
    models = {
        role: facts[role] | {"weights": facts[f"{role}_weights"], "dtype": facts[dtype]}
        for role, dtype in (("target", "dtype"), ("draft", "draft_dtype"))
    }
    return Certificate(
        policy=strip_paths(best.step.name),
        fingerprint=compute_fingerprint(field.policies[best.step.name]),
        task=facts["source"],
        problems=best.tried.problems,
        right=target.right or 0,
        harms=best.tried.harms,
        gains=best.tried.gains,
        harm_bound=best.harm,
        net_bound=best.net,
        confidence=1 - search.delta,
        max_loss=search.max_loss,
        tried=len(field.steps),
        batch_size=facts["batch_sizes"][0],
        speed=best.tried.speed,
        of_target=its.of_target.value,
        models=models,
        decoding=decoding,
        data=facts["prompts"],
        machine=facts["machine"],
        versions=facts["versions"],
    )
