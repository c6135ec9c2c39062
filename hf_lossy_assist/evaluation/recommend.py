"""Recommend an arm for each batch size in one line, based on the figures."""

from collections.abc import Sequence
from math import ceil, log

from ..policy.parse import FALLBACK, is_short_form, list_parts
from ..stats.intervals import FEWEST, Estimate
from .arms import STATIC
from .metrics import ArmMetrics


MOST_TIMES = 100  # as many batches: more are not suggested


def recommend(metrics: Sequence[ArmMetrics], batch_size: int) -> str:
    """Recommend an arm for a batch size, from the metrics of all arms measured at it."""
    here = [arm for arm in metrics if arm.batch_size == batch_size]
    targets = [arm for arm in here if arm.kind == "target"]
    policies = [arm for arm in here if arm.kind == "policy"]
    lossless_policies = [arm for arm in policies if arm.lossless]
    alone = max(targets, key=lambda arm: arm.speed)
    best = max(lossless_policies, key=lambda arm: arm.speed, default=None)
    sentences = [_recommend_lossless(best, alone, here)]
    to_beat = max(arm.speed for arm in here if arm.lossless)
    lossy = [arm for arm in policies if not arm.lossless and arm.speed > to_beat]
    if lossy:
        sentences.append(_describe_lossy(max(lossy, key=lambda arm: arm.speed)))
    return "; ".join(sentences)


def _recommend_lossless(fastest: ArmMetrics | None, alone: ArmMetrics, here: Sequence[ArmMetrics]) -> str:
    """Recommend one of the lossless arms."""
    if fastest is None:
        return f"no lossless policy was measured; the fastest of the target's own is {alone.arm}"
    best = fastest if _is_clear(fastest) else _choose_drafting(fastest, here)
    stock = max((arm for arm in here if arm.kind == "assisted"), key=lambda arm: arm.speed, default=None)
    if alone.arm == STATIC and alone.speed > max(arm.speed for arm in (best, stock) if arm is not None):
        line = f"{STATIC} with a static cache is fastest: {_format_times(alone.of_target)} the target; {best.arm} {_format_times(best.of_target)}"
        return line if _is_clear(alone) else line + _say_how_many(alone)
    if stock is not None and stock.speed > best.speed and stock.of_target.value > 1 and _is_clear(stock):
        advice = f"use Transformers' own assisted generation ({stock.arm})"
        return f"{advice}: {_format_times(stock.of_target)} the target, {_compare_texts(stock)}; {best.arm} {_format_times(best.of_target)}"
    if best.of_target.value > 1 and _is_clear(best):
        return f"use {best.arm}: {_format_times(best.of_target)} the target, {_compare_texts(best)}"
    line = f"{best.arm}, the fastest policy{' that always drafts' * (best is not fastest)}, is {_format_times(best.of_target)} the target"
    if _is_clear(best):
        return f"do not draft here: {line}"
    return f"no clear gain: {line}{_say_how_many(best)}"


def _say_how_many(arm: ArmMetrics) -> str:
    """Return how many batches would tell an arm from the target. An interval shrinks with the root of their number."""
    batches, (value, _, high) = arm.prompts // arm.batch_size, arm.of_target_all
    if batches < FEWEST:
        some = f"{batches} batch{'es' * (batches > 1)} of prompts"
        return f", on {some}, and {FEWEST} make an interval: --limit {FEWEST * arm.batch_size}"
    wanted = MOST_TIMES + 1 if high is None or value == 1 else (log(high / value) / log(value)) ** 2
    if wanted > MOST_TIMES:
        return f": {MOST_TIMES * batches} batches might not tell them apart, so do not draft"
    needed = ceil(wanted * batches) + 1
    return f": about {needed} batches would tell, --limit {needed * arm.batch_size}"


def _choose_drafting(fastest: ArmMetrics, here: Sequence[ArmMetrics]) -> ArmMetrics:
    """Return the arm that shows whether to draft: the fastest, or if that one stopped drafting, and so equals the target, the fastest that
    always drafts, if it differs clearly from the target."""
    drafts = [arm for arm in here if arm.kind == "policy" and arm.lossless and not _falls_back(arm)]
    best = max(drafts, key=lambda arm: arm.speed, default=fastest) if _falls_back(fastest) else fastest
    return best if _is_clear(best) else fastest


def _falls_back(arm: ArmMetrics) -> bool:
    """Return whether an arm stops drafting where it does not pay: then it shows the target's speed, not that of drafting."""
    name = arm.policy
    if is_short_form(name):
        return any(step == FALLBACK for step, _ in list_parts(name))
    return name.endswith(FALLBACK) or f'"{FALLBACK}"' in name  # a stop's name, or a policy's JSON form


def _is_clear(arm: ArmMetrics) -> bool:
    """Return whether an arm differs from the target by more than its interval; False for too few batches, which have no interval.

    The arm was chosen by the same figures, so the interval is the one that holds for all arms at once.
    """
    value, low, high = arm.of_target_all
    if low is None or high is None:
        return arm.prompts // arm.batch_size >= FEWEST and value != 1
    return low > 1 or high < 1


def _describe_lossy(arm: ArmMetrics) -> str:
    line = f"{arm.arm} is {_format_times(arm.of_target)} and lossy: {arm.prompts - arm.equal} of {arm.prompts} texts differ"
    if arm.right is None:
        return line
    return f"{line}, {arm.right} of {arm.judged} right ({arm.worse} lost, {arm.better} won, p = {arm.p:.2g})"


def _compare_texts(arm: ArmMetrics) -> str:
    if arm.equal == arm.prompts:
        return "same text"
    return f"{arm.prompts - arm.equal} of {arm.prompts} texts differ (ties of the arithmetic, or sampling)"


def _format_times(figure: Estimate) -> str:
    if figure.low is None:
        return f"{figure.value:.2f} ×"
    return f"{figure.value:.2f} × ({figure.low:.2f} to {figure.high:.2f})"
