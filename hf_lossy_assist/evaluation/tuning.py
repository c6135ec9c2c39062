"""The fastest setting whose loss is certified: tried on some problems, certified on others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..policy.policy import LossyPolicy
from ..stats.intervals import FEWEST, harm_bound, harms_allowed, problems_needed
from ..tasks.answers import AnswerTask, Problem
from .arms import TARGET, Arm, make_arms
from .choosing import Tried, Verdict, candidates, fastest, verdicts
from .comparing import Batches, Comparison, Tell, compare
from .figures import Figures, gain_over
from .ladders import Field
from .measuring import Writer
from .store import Memory


@dataclass(frozen=True)
class Search:
    """What is asked for: `max_loss` as a share (0.01 is one point), `delta` = 1 − confidence; `first` problems are for trying settings."""

    max_loss: float
    delta: float
    first: int
    batch_size: int = 1


@dataclass(frozen=True)
class Tuned:
    """What came of a search.

    Args:
        tried: figures on the problems that settings were tried on. certified: on the others, of the target, the best lossless
            policy and the candidates.
        verdicts: of each candidate. best: the fastest that is certified, if it clearly beats the best lossless one and the target alone.
        lossless: that one's figures.
    """

    tried: list[Figures]
    certified: list[Figures]
    verdicts: list[Verdict]
    best: Verdict | None
    lossless: Figures


def tune(
    writer: Writer, draft: Any, field: Field, task: AnswerTask, problems: Sequence[Problem], prompts: Sequence[str],
    search: Search, *, store: Memory | None = None, tell: Tell = lambda what, done: None,
) -> Tuned:  # fmt: skip
    """Try every setting on the first problems and certify candidates on the rest.

    Args:
        prompts: the problems' texts as the models are given them.
        store: where answers are kept, so that an interrupted run goes on. Its processes share the batches, and all return the same.

    Raises: `ValueError`, one line, where the target has so few right answers that a policy with none would be certified.
    """
    store = Memory() if store is None else store
    common: dict[str, Any] = {"store": store, "task": task, "problems": problems, "tell": tell}
    first = compare(
        writer, _arms(writer, draft, field.policies), prompts[: search.first], _batches(search, search.first), **common
    ).figures
    by = {its.arm: its for its in first}
    right = by[TARGET].right or 0
    if right <= search.max_loss * search.first:
        raise ValueError(
            f"the target has {right} of {search.first} problems right, so there is nothing to lose, and a policy with none right would "
            f"be certified at {search.max_loss:.2%}: see --max-new-tokens and --chat"
        )
    best_lossless = max((by[name] for name in field.lossless), key=_speed)
    tried = {its.arm: _tried(its) for its in first}
    chosen = candidates(field.steps, tried, max(_speed(best_lossless), _speed(by[TARGET])), search.max_loss)
    policies = {name: field.policies[name] for name in (best_lossless.arm, *(step.name for step in chosen))}
    rest = Batches(len(prompts), [search.batch_size], search.first)
    second = compare(writer, _arms(writer, draft, policies), prompts, rest, **common)
    later = {its.arm: its for its in second.figures}
    found = verdicts(chosen, {s.name: _tried(later[s.name]) for s in chosen}, search.max_loss, search.delta)
    best, lossless = fastest(found), later[best_lossless.arm]
    # Beside what loses nothing, a gain that may be noise is none.
    if best is not None and not _faster(second, best.step.name, max(lossless, later[TARGET], key=_speed).arm):
        best = None
    return Tuned(first, second.figures, found, best, lossless)


def _arms(writer: Writer, draft: Any, policies: Mapping[str, LossyPolicy]) -> list[Arm]:
    return make_arms(writer.target, draft, policies, tokenizer=writer.tokenizer, assisted=False)


def _batches(search: Search, prompts: int) -> Batches:
    return Batches(prompts, [search.batch_size])


def _tried(its: Figures) -> Tried:
    return Tried(_speed(its), its.worse, its.better, its.judged)


def _faster(found: Comparison, arm: str, other: str) -> bool:
    """Whether an arm is faster than another on the same prompts, by more than the interval of their ratio; too few batches tell nothing."""
    if len({answer.unit for answer in found.answers}) < FEWEST:
        return False
    gain = gain_over(found.answers, arm, other)
    return (gain.value if gain.low is None else gain.low) > 1


def _speed(its: Figures) -> float:
    return its.tokens_per_second.value


def promise(problems: int, search: Search, ladders: int) -> str:
    """What so many problems can certify, before anything is run."""
    share = search.delta / max(ladders, 1)
    allowed, least = harms_allowed(problems, search.max_loss, share), harm_bound(0, problems, share)
    needs = ", ".join(f"{problems_needed(h, search.max_loss, share)} with {h}" for h in (0, 1, 2, 5))
    can = (
        f"up to {allowed} harms certify {search.max_loss:.2%}"
        if allowed >= 0
        else f"too few for {search.max_loss:.2%}, {least:.2%} is the least they can certify"
    )
    ladder = f"; δ is shared by {ladders} ladders" if ladders > 1 else ""
    return f"{problems} problems for the certificate: {can} (needed: {needs} harms){ladder}"
