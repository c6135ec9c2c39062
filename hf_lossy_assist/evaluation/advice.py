"""One line for each batch size: what to use, by the figures."""

from collections.abc import Sequence

from ..stats.intervals import Estimate
from .arms import COMPILED, STATIC
from .figures import Figures


def advice(found: Sequence[Figures], batch_size: int) -> str:
    """What to use at a batch size, from the figures of all its arms."""
    here = [its for its in found if its.batch_size == batch_size]
    targets = [its for its in here if its.kind == "target"]
    policies = [its for its in here if its.kind == "policy"]
    ours = [its for its in policies if its.lossless]
    alone = max(targets, key=_speed)
    best = max(ours, key=_speed, default=None)
    parts = [_lossless(best, alone, here)]
    lossy = [its for its in policies if not its.lossless and _speed(its) > max(map(_speed, [*ours, alone]))]
    if lossy:
        parts.append(_lossy(max(lossy, key=_speed)))
    if alone.arm == STATIC and (best is None or not best.arm.endswith(COMPILED)) and parts[0].startswith(STATIC):
        parts.append("compiled rounds were not measured: --compile")
    return "; ".join(parts)


def _lossless(best: Figures | None, alone: Figures, here: Sequence[Figures]) -> str:
    """Of what leaves the text as it is."""
    if best is None:
        return f"no lossless policy was measured; the fastest of the target's own is {alone.arm}"
    if alone.arm == STATIC and _speed(alone) > _speed(best):
        return f"{STATIC} with a static cache is fastest: {_times(alone.of_target)} the target; {best.arm} {_times(best.of_target)}"
    low = best.of_target.low
    if best.of_target.value > 1 and (low is None or low > 1):
        same = "same text" if best.equal == best.prompts else _differ(best)
        return f"use {best.arm}: {_times(best.of_target)} the target, {same}"
    fallback = max((its for its in here if its.arm.endswith("fallback")), key=_speed, default=None)
    cost = f"; with_fallback() costs {max(1 - fallback.of_target.value, 0):.0%}" if fallback is not None else ""
    if best.of_target.value < 1:
        return f"do not draft here: {best.arm}, the fastest, is {_times(best.of_target)} the target{cost}"
    return f"no clear gain: {best.arm}, the fastest, is {_times(best.of_target)} the target{cost}"


def _lossy(its: Figures) -> str:
    said = f"{its.arm} is {_times(its.of_target)} and lossy: {its.prompts - its.equal} of {its.prompts} texts differ"
    if its.right is None:
        return said
    return f"{said}, {its.right} of {its.judged} right ({its.worse} lost, {its.better} won, p = {its.p:.2g})"


def _differ(its: Figures) -> str:
    return f"{its.prompts - its.equal} of {its.prompts} texts differ (ties of the arithmetic, or sampling)"


def _times(figure: Estimate) -> str:
    if figure.low is None:
        return f"{figure.value:.2f} ×"
    return f"{figure.value:.2f} × ({figure.low:.2f} to {figure.high:.2f})"


def _speed(its: Figures) -> float:
    return its.tokens_per_second.value
