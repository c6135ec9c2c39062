"""One line for each batch size: what to use, by the figures."""

from collections.abc import Sequence

from ..policy.short_form import FALLBACK, is_short_form, list_parts
from ..stats.intervals import FEWEST, Estimate
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
    to_beat = max(_speed(its) for its in here if its.lossless)
    lossy = [its for its in policies if not its.lossless and _speed(its) > to_beat]
    if lossy:
        parts.append(_lossy(max(lossy, key=_speed)))
    if alone.arm == STATIC and (best is None or not best.arm.endswith(COMPILED)) and parts[0].startswith(STATIC):
        parts.append("compiled rounds were not measured: --compile")
    return "; ".join(parts)


def _lossless(fastest: Figures | None, alone: Figures, here: Sequence[Figures]) -> str:
    """Of what leaves the text as it is."""
    if fastest is None:
        return f"no lossless policy was measured; the fastest of the target's own is {alone.arm}"
    best = fastest if _clear(fastest) else _drafting(fastest, here)
    stock = max((its for its in here if its.kind == "assisted"), key=_speed, default=None)
    if alone.arm == STATIC and _speed(alone) > max(_speed(its) for its in (best, stock) if its is not None):
        return f"{STATIC} with a static cache is fastest: {_times(alone.of_target)} the target; {best.arm} {_times(best.of_target)}"
    if stock is not None and _speed(stock) > _speed(best) and stock.of_target.value > 1 and _clear(stock):
        own = f"use Transformers' own assisted generation ({stock.arm})"
        return f"{own}: {_times(stock.of_target)} the target, {_text(stock)}; {best.arm} {_times(best.of_target)}"
    if best.of_target.value > 1 and _clear(best):
        return f"use {best.arm}: {_times(best.of_target)} the target, {_text(best)}"
    fallback = max((its for its in here if _falls_back(its)), key=_speed, default=None)
    cost = f"; with_fallback() costs {max(1 - fallback.of_target.value, 0):.0%}" if fallback is not None else ""
    its = f"{best.arm}, the fastest{' that always drafts' * (best is not fastest)}, is {_times(best.of_target)} the target"
    if _clear(best):
        return f"do not draft here: {its}{cost}"
    batches = best.prompts // best.batch_size
    few = (
        ""
        if batches >= FEWEST
        else f", on {batches} batch{'es' * (batches > 1)} of prompts, and {FEWEST} make an interval"
    )
    return f"no clear gain: {its}{few}{cost}"


def _drafting(fastest: Figures, here: Sequence[Figures]) -> Figures:
    """What tells whether to draft where the fastest is one that stopped drafting and so is like the target: the fastest of
    those that always draft, if that one is told from the target."""
    drafts = [its for its in here if its.kind == "policy" and its.lossless and not _falls_back(its)]
    best = max(drafts, key=_speed, default=fastest) if _falls_back(fastest) else fastest
    return best if _clear(best) else fastest


def _falls_back(its: Figures) -> bool:
    """Whether an arm stops drafting where that does not pay: it shows what the target does, not what drafting does."""
    name = its.arm.removesuffix(COMPILED)
    if is_short_form(name):
        return any(part == FALLBACK for part, _ in list_parts(name))
    return name.endswith(FALLBACK) or f'"{FALLBACK}"' in name  # a stop by its name, or a policy's JSON form


def _clear(its: Figures) -> bool:
    """Whether an arm differs from the target by more than its interval; too few batches of prompts have none and tell nothing.

    The arm was chosen by the same figures, so the interval is the one that holds for all arms at once.
    """
    value, low, high = its.of_target_all
    if low is None or high is None:
        return its.prompts // its.batch_size >= FEWEST and value != 1
    return low > 1 or high < 1


def _lossy(its: Figures) -> str:
    said = f"{its.arm} is {_times(its.of_target)} and lossy: {its.prompts - its.equal} of {its.prompts} texts differ"
    if its.right is None:
        return said
    return f"{said}, {its.right} of {its.judged} right ({its.worse} lost, {its.better} won, p = {its.p:.2g})"


def _text(its: Figures) -> str:
    if its.equal == its.prompts:
        return "same text"
    return f"{its.prompts - its.equal} of {its.prompts} texts differ (ties of the arithmetic, or sampling)"


def _times(figure: Estimate) -> str:
    if figure.low is None:
        return f"{figure.value:.2f} ×"
    return f"{figure.value:.2f} × ({figure.low:.2f} to {figure.high:.2f})"


def _speed(its: Figures) -> float:
    return its.tokens_per_second.value
