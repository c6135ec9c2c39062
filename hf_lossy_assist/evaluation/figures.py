"""The figures of each arm, from what was written and how long it took. Nothing here runs a model."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..stats.intervals import Estimate, mcnemar, rate, ratio, wilson
from .arms import TARGET
from .measuring import Answer


@dataclass(frozen=True)
class Figures:
    """One arm at one batch size.

    Args:
        tokens_per_second: new tokens of all rows, with an interval over the batches of prompts.
        of_target: times the target's speed on the same prompts. of_target_all: with an interval that holds for all arms of
            the batch size at once (Bonferroni), for a choice among them. of_assisted: times the speed of Transformers' faster
            assisted form, where one was measured.
        first_token: median seconds until the first new token of a prompt alone; None in batches.
        tokens_per_target_call: of one row.
        acceptance: accepted ÷ verified drafted tokens; None where it is not reported.
        lossy, unchecked: shares of the new tokens: accepted though strict acceptance would have rejected them; accepted unseen.
        equal: texts equal to the target's, token by token.
        accuracy: share of the answers that the task calls right, with Wilson's interval; None without a task. `right` of `judged`.
        better, worse: prompts that this arm has right and the target wrong, and the other way round. p: McNemar's exact test of them.
    """

    arm: str
    kind: str
    lossless: bool
    batch_size: int
    prompts: int
    new_tokens: int
    tokens_per_second: Estimate
    of_target: Estimate
    of_target_all: Estimate
    of_assisted: Estimate | None
    first_token: float | None
    tokens_per_target_call: float | None
    acceptance: float | None
    lossy: float
    unchecked: float
    equal: int
    right: int | None
    judged: int
    accuracy: Estimate | None
    better: int
    worse: int
    p: float | None

    def guarantee(self, rounds: bool) -> str:
        """Say what holds of the texts. `rounds`: the models' precision is below float32."""
        if not self.lossless:
            return "lossy"
        return "lossless" + " up to rounding" * (rounds and self.kind == "policy")

    def to_dict(self) -> dict[str, Any]:
        """One flat row, in plain numbers; the speeds' names are also Spec-Bench's and vLLM's."""
        row: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name == "of_target_all":
                row |= {f"{name}_low": value.low, f"{name}_high": value.high}
            elif isinstance(value, Estimate) or name in ("accuracy", "of_assisted"):
                value, low, high = (None, None, None) if value is None else value
                row |= {name: value, f"{name}_low": low, f"{name}_high": high}
            else:
                row[name] = value
        return row


class Described(Protocol):
    """The attributes of an arm that its figures need."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def lossless(self) -> bool: ...


def figures(answers: Sequence[Answer], arms: Iterable[Described]) -> list[Figures]:
    """Of every arm at every batch size at which it wrote something, in the order of `arms`; beside the others on its own prompts."""
    found: list[Figures] = []
    by: defaultdict[tuple[int, str], list[Answer]] = defaultdict(list)
    for answer in answers:
        by[answer.batch_size, answer.arm].append(answer)
    for size in sorted({size for size, _ in by}):
        here = [(arm, sorted(by[size, arm.name], key=lambda a: a.prompt)) for arm in arms if by[size, arm.name]]
        base = next(its for arm, its in here if arm.name == TARGET)
        assisted = max((its for arm, its in here if arm.kind == "assisted"), key=_speed, default=None)
        for arm, its in here:
            beside = None if assisted is None else _same(assisted, its)
            found.append(_of(arm, its, _same(base, its), beside, len(here)))
    return found


def _same(answers: list[Answer], others: list[Answer]) -> list[Answer]:
    """Those of the same prompts."""
    prompts = {answer.prompt for answer in others}
    return [answer for answer in answers if answer.prompt in prompts]


def _of(arm: Described, its: list[Answer], base: list[Answer], assisted: list[Answer] | None, arms: int) -> Figures:
    tokens = sum(len(answer.token_ids) for answer in its)
    calls = None if any(answer.target_calls is None for answer in its) else sum(a.target_calls or 0 for a in its)
    verified = sum(answer.num_draft_tokens for answer in its)
    firsts = [answer.first_token for answer in its if answer.first_token is not None]
    # A prompt whose right answer nobody knows is neither right nor wrong.
    pairs = [(a.right, b.right) for a, b in zip(its, base, strict=True) if a.right is not None and b.right is not None]
    right = sum(mine for mine, _ in pairs)
    better, worse = (sum(a is side and b is not side for a, b in pairs) for side in (True, False))
    return Figures(
        arm=arm.name,
        kind=arm.kind,
        lossless=arm.lossless,
        batch_size=its[0].batch_size,
        prompts=len(its),
        new_tokens=tokens,
        tokens_per_second=rate(*_units(its)),
        of_target=ratio(*_units(its), *_units(base)),
        of_target_all=ratio(*_units(its), *_units(base), confidence=1 - 0.05 / max(arms - 1, 1)),
        of_assisted=None if assisted is None else ratio(*_units(its), *_units(assisted)),
        first_token=statistics.median(firsts) if firsts else None,
        tokens_per_target_call=tokens / calls if calls else None,
        acceptance=sum(a.num_accepted_draft_tokens for a in its) / verified if verified else None,
        lossy=sum(a.num_lossy_accepts for a in its) / tokens,
        unchecked=sum(a.num_unchecked_tokens for a in its) / tokens,
        equal=sum(a.token_ids == b.token_ids for a, b in zip(its, base, strict=True)),
        right=right if pairs else None,
        judged=len(pairs),
        accuracy=wilson(right, len(pairs)) if pairs else None,
        better=better,
        worse=worse,
        p=mcnemar(better, worse) if pairs and arm.name != TARGET else None,
    )


def gain_over(answers: Sequence[Answer], arm: str, other: str) -> Estimate:
    """Times the speed of the arm `other` that `arm` has; both wrote the same prompts, in batches of one size."""
    its, others = ([answer for answer in answers if answer.arm == name] for name in (arm, other))
    return ratio(*_units(its), *_units(others))


def _units(answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
    """New tokens and seconds of each batch."""
    tokens: defaultdict[int, float] = defaultdict(float)
    seconds: dict[int, float] = {}
    for answer in answers:
        tokens[answer.unit] += len(answer.token_ids)
        seconds[answer.unit] = answer.seconds
    return [tokens[unit] for unit in sorted(tokens)], [seconds[unit] for unit in sorted(tokens)]


def _speed(answers: Sequence[Answer]) -> float:
    tokens, seconds = _units(answers)
    return sum(tokens) / sum(seconds)
