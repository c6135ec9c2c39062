"""Compute the figures of each arm from its outputs and times, without running a model."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from ..stats.intervals import Estimate, mcnemar, rate, ratio, wilson
from ..stats.speculation import EXACT, name_guarantee
from ..terminal import digits
from .arms import COMPILED, DRAFTED_BY, TARGET, Arm
from .writer import ArmOutput


NONE = "–"  # a cell without a figure


@dataclass(frozen=True)
class ArmMetrics:
    """Figures of one arm at one batch size.

    Args:
        tokens_per_second: new tokens of all rows, with an interval over the batches of prompts.
        of_target: speed relative to the target on the same prompts. of_target_all: with an interval that holds for all arms of
            the batch size at once (Bonferroni), for choosing among them. of_assisted: relative to the fastest of
            Transformers' arms with drafts, if one was measured.
        first_token: median seconds until the first new token of a single prompt; None in batches.
        tokens_per_target_call: of one row.
        acceptance: accepted ÷ verified drafted tokens; None if not reported.
        lossy, unchecked: shares of the new tokens: accepted although strict acceptance would have rejected them; accepted without verification.
        equal: texts equal to the target's, token by token.
        accuracy: share of the answers that the task judges right, with Wilson's interval; None without a task. `right` of `judged`.
        better, worse: prompts that this arm answers right and the target wrong, and vice versa. p: McNemar's exact test on them.
    """

    arm: str
    kind: str
    lossless: bool
    draft: str | None
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

    @property
    def policy(self) -> str:
        """The arm's name, without the name of its draft and its form."""
        return self.arm.removesuffix(COMPILED).removesuffix(f"{DRAFTED_BY}{self.draft}")

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens_per_second.value

    def guarantee(self, dtype: object) -> str:
        """Return the guarantee for the texts. `dtype`: the precision of the target, whose texts without a draft are exact in each."""
        return name_guarantee(self.lossless, dtype if self.kind in ("policy", "assisted") else EXACT[0])

    def to_dict(self) -> dict[str, object]:
        """Return one flat row of plain numbers; the names of speeds are those of Spec-Bench and vLLM."""
        row: dict[str, object] = {}
        for name, value in asdict(self).items():
            if name in ESTIMATES:
                row[name], row[f"{name}_low"], row[f"{name}_high"] = value or (None, None, None)
            else:
                row[name] = value
        del row["of_target_all"]  # as in of_target
        return row


ESTIMATES = ("tokens_per_second", "of_target", "of_target_all", "of_assisted", "accuracy")


def _format(figure: Estimate | float | None, form: str) -> str:
    """Return a figure with its interval in brackets, if it has one; a dash if there is none."""
    if isinstance(figure, Estimate):
        return f"{figure.value:{form}}" + (
            "" if figure.low is None else f" ({figure.low:{form}}–{figure.high:{form}})"
        )
    return format(figure, form) if figure else NONE


def format_row(metrics: ArmMetrics, dtype: object) -> list[dict[str, str]]:
    """Return an arm's cells by column, for the tables of speed, acceptance and answers. `dtype`: the precision of the target."""
    changed, accuracy, first = NONE, metrics.accuracy, metrics.first_token
    if metrics.p is not None and metrics.better + metrics.worse > 0:
        changed = f"+{metrics.better} −{metrics.worse}, {metrics.p:.2g}"
    return [
        {
            "tokens/s": _format(metrics.tokens_per_second, f".{digits(metrics.speed)}f"),
            "× target": "1" if metrics.arm == TARGET else _format(metrics.of_target, ".2f"),
            "× assisted": _format(metrics.of_assisted and metrics.of_assisted.value, ".2f"),
            "first, ms": _format(first and first * 1e3, ".0f"),
        },
        {
            "a call": _format(metrics.tokens_per_target_call, ".2f"),
            "accepted": _format(metrics.acceptance, ".0%"),
            "lossy": _format(metrics.lossy, ".1%"),
            "unchecked": _format(metrics.unchecked, ".1%"),
            "same text": f"{metrics.equal}/{metrics.prompts}",
            "guarantee": metrics.guarantee(dtype),
        },
        {
            "right": NONE if metrics.right is None else f"{metrics.right}/{metrics.judged}",
            "95 %": NONE if accuracy is None else f"{accuracy.low:.0%}–{accuracy.high:.0%}",
            "won, lost, p": changed,
        },
    ]


def compute_metrics(answers: Sequence[ArmOutput], arms: Iterable[Arm]) -> list[ArmMetrics]:
    """Return the metrics of every arm at every batch size, in the order of `arms`; arms are compared on the same prompts."""
    metrics_found: list[ArmMetrics] = []
    by: defaultdict[tuple[int, str], list[ArmOutput]] = defaultdict(list)
    for answer in sorted(answers, key=lambda answer: answer.prompt):
        by[answer.batch_size, answer.arm].append(answer)
    for size in sorted({size for size, _ in by}):
        here = [(arm, by[size, arm.name]) for arm in arms if by[size, arm.name]]
        rivals = [outputs for arm, outputs in here if arm.kind == "assisted"]
        assisted = max(rivals, key=lambda outputs: rate(*_sum_units(outputs)).value, default=None)
        for arm, outputs in here:
            metrics_found.append(_measure_arm(arm, outputs, by[size, TARGET], assisted, len(here)))
    return metrics_found


def _measure_arm(
    arm: Arm, outputs: list[ArmOutput], target: list[ArmOutput], assisted: list[ArmOutput] | None, arms: int
) -> ArmMetrics:
    prompts = {answer.prompt for answer in outputs}
    base = [answer for answer in target if answer.prompt in prompts]
    beside = [answer for answer in assisted or () if answer.prompt in prompts]
    tokens, speed, alone = sum(len(answer.token_ids) for answer in outputs), _sum_units(outputs), _sum_units(base)
    counted = [answer.target_calls for answer in outputs if answer.target_calls is not None]
    calls = sum(counted) if len(counted) == len(outputs) else 0
    verified = sum(answer.num_draft_tokens for answer in outputs)
    firsts = [answer.first_token for answer in outputs if answer.first_token is not None]
    # A prompt without a known right answer is neither right nor wrong.
    pairs = [
        (a.right, b.right) for a, b in zip(outputs, base, strict=True) if a.right is not None and b.right is not None
    ]
    right = sum(is_right for is_right, _ in pairs)
    better, worse = (sum(a is side and b is not side for a, b in pairs) for side in (True, False))
    return ArmMetrics(
        arm=arm.name,
        kind=arm.kind,
        lossless=arm.lossless,
        draft=arm.draft,
        batch_size=outputs[0].batch_size,
        prompts=len(outputs),
        new_tokens=tokens,
        tokens_per_second=rate(*speed),
        of_target=ratio(*speed, *alone),
        of_target_all=ratio(*speed, *alone, confidence=1 - 0.05 / max(arms - 1, 1)),
        of_assisted=ratio(*speed, *_sum_units(beside)) if beside else None,
        first_token=statistics.median(firsts) if firsts else None,
        tokens_per_target_call=tokens / calls if calls else None,
        acceptance=sum(a.num_accepted_draft_tokens for a in outputs) / verified if verified else None,
        lossy=sum(a.num_lossy_accepts for a in outputs) / tokens,
        unchecked=sum(a.num_unchecked_tokens for a in outputs) / tokens,
        equal=sum(a.token_ids == b.token_ids for a, b in zip(outputs, base, strict=True)),
        right=right if pairs else None,
        judged=len(pairs),
        accuracy=wilson(right, len(pairs)) if pairs else None,
        better=better,
        worse=worse,
        p=mcnemar(better, worse) if pairs and arm.name != TARGET else None,
    )


def compute_gain(answers: Sequence[ArmOutput], arm: str, other: str) -> Estimate:
    """Return the speed of `arm` relative to `other`, on the same prompts in batches of one size."""
    outputs, others = ([answer for answer in answers if answer.arm == name] for name in (arm, other))
    return ratio(*_sum_units(outputs), *_sum_units(others))


def _sum_units(answers: Sequence[ArmOutput]) -> tuple[list[float], list[float]]:
    """Return new tokens and seconds of each batch."""
    tokens: defaultdict[int, float] = defaultdict(float)
    seconds: dict[int, float] = {}
    for answer in answers:
        tokens[answer.unit] += len(answer.token_ids)
        seconds[answer.unit] = answer.seconds
    return [tokens[unit] for unit in sorted(tokens)], [seconds[unit] for unit in sorted(tokens)]
