"""Decide whether a run confirms a table's claim, from the figure, its 95 % interval, and the rule in the table's file."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from along_texts import AlongTexts
from demo_runs import Measured
from paper_tables import LONG, RATIOS, TEXTS, Check
from scipy.stats import pearsonr, sem, t
from text_quality import Judge, compute_rouge

from hf_lossy_assist.evaluation.writer import ArmOutput
from hf_lossy_assist.stats.intervals import FEWEST, Estimate, harm_bound, rate, ratio, wilson
from hf_lossy_assist.tasks.base import Problem


CONFIRMED, DIRECTION = "confirmed in size", "direction only"
NOT_CONFIRMED, CANNOT = "not confirmed", "cannot be tested here"
DELTA = 0.05  # a 95 % bound
OFTEN = 20  # times that a token occurs before its means count
Parts = tuple[list[float], list[float]]  # numerators and denominators, by unit


@dataclass(frozen=True)
class Outcome:
    """The result of a check. `shown`: the figure for people; `why`: the reason of a verdict other than "confirmed in size"."""

    says: str
    published: str
    verdict: str
    shown: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def outcome(check: Check, found: Measured, judge: Judge | None = None) -> Outcome:
    """Judge one check by its rule."""
    published = check.published or "–"
    if check.cannot is not None:
        return Outcome(check.says, published, CANNOT, why=check.cannot)
    if check.figure == "win_tie":
        if judge is None:
            return Outcome(check.says, published, CANNOT, why="it needs a judge model (--judge-url, --judge-model)")
        figure, shown = _win_tie(check, found, judge)
    elif check.figure in LONG:
        if found.along is None:
            why = "it needs a model that writes long texts (--long-model, --long-drafter, --long-prompts)"
            return Outcome(check.says, published, CANNOT, why=why)
        figure, shown = _along(check, found.along)
    elif check.figure in TEXTS:
        figure, shown = _along_texts(check, found)
    else:
        others = {"information": _information, "positive": _positive, "auroc": _auroc, "harm": _harm, "flops": _flops}
        figure, shown = others.get(check.figure or "", _ratio)(check, found)
    verdict, why = _verdict(check, figure)
    if check.figure == "speed" and check.beside is not None and _same_work(check, found):
        verdict, why = NOT_CONFIRMED, "both wrote the same in the same rounds, so nothing was saved"
    return Outcome(check.says, published, verdict, shown, *figure, why)


def _verdict(check: Check, figure: Estimate) -> tuple[str, str]:
    """Return "confirmed in size" or "direction only" if the whole interval is on the right side of the size or of the bound."""
    low, high = figure.low, figure.high
    if check.at_most is not None and high is not None:
        bound, good, bad = check.at_most, high <= check.at_most, figure.value > check.at_most
    elif low is None or high is None:
        return (
            NOT_CONFIRMED,
            "there is no interval: nothing varied, there were too few units, or one of them had it all",
        )
    elif check.above is not None:
        bound, good, bad = check.above, low > check.above, high < check.above
    else:
        assert check.below is not None, "the tables' reader has seen to it"
        bound, good, bad = check.below, high < check.below, low > check.below
    if good and check.size is None:
        return DIRECTION, ""
    if good:
        assert high is not None and check.size is not None, "it has an interval and a size"
        reached = low is not None and low >= check.size if check.above is not None else high <= check.size
        return (CONFIRMED if reached else DIRECTION), ""
    side = ("below" if check.above is not None else "above") if bad else "includes"
    return NOT_CONFIRMED, f"{side} {bound:g}"


def _arm(found: Measured, arm: str | None, size: int | None) -> list[ArmOutput]:
    """Return an arm's answers at a batch size (default: the smallest), in the order of the prompts."""
    sizes = {answer.batch_size for answer in found.answers}
    here = size if size in sizes else min(sizes)
    chosen = [answer for answer in found.answers if answer.arm == arm and answer.batch_size == here]
    return sorted(chosen, key=lambda answer: answer.prompt)


def _same_work(check: Check, found: Measured) -> bool:
    """Return whether two policies gave the same tokens in the same rounds."""
    first, second = (
        [
            (answer.token_ids, answer.accept_lengths, answer.num_draft_tokens)
            for answer in _arm(found, name, check.batch_size)
        ]
        for name in (check.arm, check.beside)
    )
    return first == second


def parts(figure: str, answers: Sequence[ArmOutput], problems: Sequence[Problem]) -> Parts:
    """Return numerator and denominator of a figure by unit: speed by batches, whose rows share the seconds, the others by prompts."""
    above: defaultdict[int, float] = defaultdict(float)
    below: dict[int, float] = {}
    for answer in answers:
        unit = answer.unit if figure == "speed" else answer.prompt
        pair = {
            "speed": (len(answer.token_ids), answer.seconds),
            "tokens_per_call": (len(answer.token_ids), answer.target_calls or 0),
            "accepted": (answer.num_accepted_draft_tokens, answer.num_draft_tokens),
            "verified": (answer.num_draft_tokens, len(answer.token_ids)),
            "computed": (answer.num_draft_tokens + (answer.target_calls or 0), len(answer.token_ids)),
            "right": (bool(answer.right), 1),
            "rougeL": (compute_rouge(problems[answer.prompt], answer.text) if figure == "rougeL" else 0.0, 1),
        }[figure]
        above[unit] += pair[0]
        below[unit] = pair[1]
    units = sorted(above)
    return [above[unit] for unit in units], [float(below[unit]) for unit in units]


def _ratio(check: Check, found: Measured) -> tuple[Estimate, str]:
    assert check.figure is not None
    if check.beside is None:
        figure = rate(*parts(check.figure, _arm(found, check.arm, check.batch_size), found.problems))
        return figure, f"{_span(figure)} {RATIOS[check.figure]}"
    first, second = (
        parts(check.figure, _arm(found, name, check.batch_size), found.problems) for name in (check.arm, check.beside)
    )
    figure = ratio(*first, *second)
    shares = [sum(above) / sum(below) for above, below in (first, second)]
    values = [f"{share:.0f}" if share >= 100 else f"{share:.3g}" for share in shares]
    return figure, f"{_times(figure)}: {values[0]} for {values[1]} {RATIOS[check.figure]}"


def _along_texts(check: Check, found: Measured) -> tuple[Estimate, str]:
    """Compare rejected with accepted tokens ("entropy", "kl"), or the lengths that stops propose with the oracle's ("delta", "misfit")."""
    if check.figure in ("entropy", "kl"):
        values = [(getattr(text, check.figure), text.match) for text in found.texts]
        kinds = [
            ([float(value[kind].sum()) for value, kind in rows], [float(kind.sum()) for _, kind in rows])
            for rows in ([(value, ~match) for value, match in values], values)
        ]
        figure = ratio(*kinds[0], *kinds[1])
        rejected, accepted = (sum(above) / sum(below) for above, below in kinds)
        return figure, f"{_times(figure)}: {rejected:.2f} nats where rejected, {accepted:.2f} where accepted"
    if check.figure == "by_token":
        pairs = _by_token(found)
        return _correlation(pairs), f"{_span(_correlation(pairs))}, {len(pairs)} tokens"
    assert check.arm is not None
    rounds = [text.lengths(check.arm) for text in found.texts]
    if check.figure == "follows":
        figure = _correlation([(float(a), float(b)) for text in rounds for a, b in text])
        return figure, f"correlation {_span(figure)}"
    deltas = [_mean([proposed - oracle for proposed, oracle in text]) for text in rounds]
    if check.figure == "delta":
        figure = _mean_interval(deltas)
        if figure.value < 0 and figure.low is not None and figure.high is not None:
            figure = Estimate(-figure.value, -figure.high, -figure.low)
            return figure, f"{_span(figure)} tokens fewer than the oracle's"
        return figure, f"{_span(figure)} tokens more than the oracle's"
    assert check.beside is not None
    sums, counts = zip(
        *(_misfits([text.lengths(stop) for text in found.texts]) for stop in (check.arm, check.beside)), strict=True
    )
    figure = ratio(sums[0], counts[0], sums[1], counts[1])
    shares = [sum(above) / sum(below) for above, below in zip(sums, counts, strict=True)]
    return figure, f"{_times(figure)}: {shares[0]:.2f} for {shares[1]:.2f} tokens off the oracle's length"


def _along(check: Check, found: AlongTexts) -> tuple[Estimate, str]:
    """Compare two policies' speeds over long texts ("long_speed"), or that ratio in the last window with that in the first ("growth")."""
    ours, others = (found.seconds[name] for name in (check.arm or "", check.beside or ""))
    about = f"{len(ours)} texts of {found.windows[-1]} tokens, {found.about}"
    if check.figure == "long_speed":  # the same tokens, so a ratio of speeds is one of seconds
        ones = [1.0] * len(ours)
        figure = ratio(ones, list(map(sum, ours)), ones, list(map(sum, others)))
        return figure, f"{_times(figure)}: {about}"
    last, first = (([text[part] for text in others], [text[part] for text in ours]) for part in (-1, 0))
    figure, gains = ratio(*last, *first), [sum(above) / sum(below) for above, below in (last, first)]
    windows = f"tokens {found.windows[-2]} to {found.windows[-1]}", f"the first {found.windows[0]}"
    return figure, f"{_times(figure)}: {gains[0]:.2f} × in {windows[0]}, {gains[1]:.2f} × in {windows[1]}; {about}"


def _by_token(found: Measured) -> list[tuple[float, float]]:
    """Return the draft's mean entropy and its share of agreement for each token that occurs often enough."""
    seen: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for text in found.texts:
        for token, entropy, match in zip(text.tokens, text.entropy.tolist(), text.match.tolist(), strict=True):
            seen[token].append((entropy, float(match)))
    often = [rows for rows in seen.values() if len(rows) >= OFTEN]
    return [(_mean([entropy for entropy, _ in rows]), _mean([match for _, match in rows])) for rows in often]


def _correlation(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Return Pearson's correlation with Fisher's interval."""
    result = pearsonr(*zip(*pairs, strict=True))
    span = result.confidence_interval()
    return Estimate(float(result.statistic), float(span.low), float(span.high))


def _misfits(rounds: Sequence[Sequence[tuple[int, int]]]) -> Parts:
    return [float(sum(abs(a - b) for a, b in text)) for text in rounds], [float(len(text)) for text in rounds]


def _positive(check: Check, found: Measured) -> tuple[Estimate, str]:
    """Count pairs of models in which S and A tell something."""
    assert check.cells is not None
    gains = [_mean([_row(rows, check.cells)["gain"] for rows in repeats]) for repeats in found.information.values()]
    positive = sum(gain > 0 for gain in gains)
    return wilson(positive, len(gains)), f"{positive} of {len(gains)} pairs, {min(gains):.3f} to {max(gains):.3f} bits"


def _auroc(check: Check, found: Measured) -> tuple[Estimate, str]:
    assert check.arm is not None
    metrics = found.heads[check.arm]
    figure = Estimate(metrics["auroc"], metrics["auroc_low"], metrics["auroc_high"])
    return figure, f"AUROC {_span(figure)}"


def _flops(check: Check, found: Measured) -> tuple[Estimate, str]:
    """Return the ratio of two counts, which no sample has an influence on."""
    ours, others = (found.flops[name] for name in (check.arm or "", check.beside or ""))
    figure = Estimate(ours / others, ours / others, ours / others)
    return figure, f"{figure.value:.2f} × (counted): {ours / 1e9:.2f} for {others / 1e9:.2f} billion"


def _span(figure: Estimate) -> str:
    span = "" if figure.low is None else f" ({figure.low:.3g}–{figure.high:.3g})"
    return f"{figure.value:.3g}{span}"


def _times(figure: Estimate) -> str:
    span = "" if figure.low is None else f" ({figure.low:.2f}–{figure.high:.2f})"
    return f"{figure.value:.2f} ×{span}"


def _share(figure: Estimate) -> str:
    span = "" if figure.low is None or figure.high is None else f" ({100 * figure.low:.0f}–{100 * figure.high:.0f} %)"
    return f"{100 * figure.value:.0f} %{span}"


def _harm(check: Check, found: Measured) -> tuple[Estimate, str]:
    """Count answers that the target has right and the arm wrong, with the exact upper bound on their share."""
    pairs = list(zip(_arm(found, check.arm, check.batch_size), _arm(found, "target", check.batch_size), strict=True))
    harms = sum(bool(base.right) and not answer.right for answer, base in pairs)
    bound = harm_bound(harms, len(pairs), DELTA)
    return Estimate(harms / len(pairs), None, bound), f"{harms} of {len(pairs)} harmed, at most {100 * bound:.1f} %"


def _win_tie(check: Check, found: Measured, judge: Judge) -> tuple[Estimate, str]:
    """Count outputs of the arm that the judge finds better or as good, among those it decides."""
    gains = [
        judge.compare(found.problems[answer.prompt].prompt, base, answer)
        for answer, base in zip(
            *(_arm(found, name, check.batch_size) for name in (check.arm, check.beside)), strict=True
        )
    ]
    read = [gain for gain in gains if gain is not None]
    if not read:
        return Estimate(0.0, None, None), "no verdict of the judge could be read"
    figure = wilson(sum(gain >= 0 for gain in read), len(read))
    return figure, f"{_share(figure)} of {len(read)}"


def _information(check: Check, found: Measured) -> tuple[Estimate, str]:
    """Return the share of the uncertainty that S and A explain, over repeats on other problems, or its ratio to that of other cells."""
    assert check.pair is not None and check.cells is not None
    repeats = found.information[check.pair]
    gains, bits = ([_row(rows, check.cells)[key] for rows in repeats] for key in ("gain", "entropy"))
    if check.beside_cells is not None:
        others = [_row(rows, check.beside_cells)["gain"] for rows in repeats]
        figure = ratio(gains, bits, others, bits)
        return figure, f"{_times(figure)}: {_mean(gains):.3f} for {_mean(others):.3f} bits"
    figure = rate(gains, bits)
    return figure, f"{_share(figure)}: {_mean(gains):.3f} of {_mean(bits):.3f} bits"


def _row(rows: Sequence[dict[str, Any]], cells: str) -> dict[str, Any]:
    return next(row for row in rows if row["resolution"] == cells)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_interval(values: Sequence[float]) -> Estimate:
    """Return the mean with Student's t interval; without one for few numbers, and if all are equal."""
    value, units = _mean(values), len(values)
    if units < FEWEST or len(set(values)) == 1:
        return Estimate(value, None, None)
    low, high = t.interval(0.95, units - 1, value, sem(values))
    return Estimate(value, float(low), float(high))
