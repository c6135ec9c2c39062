"""The published methods: recipes that return a `LossyPolicy`, and their registry entries."""

from transformers import PreTrainedModel

from ..artifacts.head import Head
from ..artifacts.sv_profile import Profile
from ..filters.sv import Exactness, SVFilter
from ..registry import HeadKind, register_method
from ..rules.head_rules import AllButLast, Judge
from ..stops import DraftStop
from ..stops.confidence import SVIP, HeadStop, SpecDecPP, SVIPForm
from ..stops.constant import Constant
from ..validation import LONGEST_DRAFT, check_int
from .policy import LossyPolicy


WINDOW = 32  # tokens that AutoJudge drafts in a round


def strict() -> LossyPolicy:
    """Speculative decoding: strict acceptance, and the draft lengths of the call (Leviathan et al., huggingface.co/papers/2211.17192). Lossless."""
    return LossyPolicy()


def svip(
    h: float = SVIP.h, c: float = SVIP.c, form: SVIPForm = SVIP.form, max_draft: int = SVIP.max_draft
) -> LossyPolicy:
    """SVIP: strict acceptance; a row stops drafting when the draft's entropy makes acceptance unlikely. Lossless. Arguments as in `SVIP`."""
    return LossyPolicy(stop=SVIP(h, c, form, max_draft))


def sprinter(
    head: Head, threshold: float | None = None, max_draft: int = HeadStop.max_draft, patience: float = 0.0
) -> LossyPolicy:
    """SPRINTER: draft while the head's V ≥ `threshold`; accept all drafted tokens unchecked except the last, which is verified.

    Zhong et al., SPRINTER (huggingface.co/papers/2502.04557). **Lossy**: a share η_FP of the tokens that strict acceptance would reject
    remains in the text. A `threshold` of 1 stops at every token and is bit-equal to strict acceptance with γ = 1.

    Args:
        head (`Head`): from `hf-lossy fit sprinter`, or `Head.from_pretrained(…)`.
        threshold: τ; a lower one drafts longer and loses more. None: the head's, or 0.5. `hf-lossy compare` measures which one pays.
        max_draft: the maximum tokens of one round.
        patience: see `HeadStop`; for batches. 0 ends the round for all rows when one stops: 1.15 × strict acceptance in batches of 32
            on the demo, where waiting for every row gives 0.80 × (docs/log.md). With 1, a row's greedy text is the same as alone.

    Raises: `TypeError` or `ValueError`, one line, for an unsuitable head and for values out of range.
    """
    return LossyPolicy(
        AllButLast(), HeadStop(head, _choose_threshold(head, threshold, HeadStop.threshold), max_draft, patience)
    )


def specdec(head: Head, threshold: float | None = None, max_draft: int = SpecDecPP.max_draft) -> LossyPolicy:
    """SpecDec++: strict acceptance; a row stops drafting when a rejection in its draft has become likely (Huang et al.,
    huggingface.co/papers/2405.19715). Lossless. `threshold`: the paper's h; None: the head's, or 0.7.
    """
    return LossyPolicy(stop=SpecDecPP(head, _choose_threshold(head, threshold, SpecDecPP.threshold), max_draft))


def autojudge(
    head: Head, threshold: float | None = None, window: int | None = None, stop: DraftStop | None = None
) -> LossyPolicy:
    """AutoJudge: strict acceptance, but a mismatch that the head finds unimportant is accepted, and the draft continues after it.

    Garipov et al., AutoJudge (huggingface.co/papers/2504.20039). **Lossy**: only a measurement on your task shows the loss.
    `threshold` 0 is bit-equal to strict acceptance with the same window, 1 accepts everything.

    Args:
        head (`Head`): from `hf-lossy fit autojudge`, or `Head.from_pretrained(…)`.
        threshold: a mismatch is accepted where P(important) < threshold; None: the head's (recall ≥ 90 % when it was trained).
        window: tokens drafted in a round, by default 32: longer than for strict acceptance, as more are accepted (the paper: 64).
        stop (`DraftStop`, *optional*): replaces the constant window, for example `SVIP()`.

    Raises: `TypeError` or `ValueError`, one line, for an unsuitable head and for values out of range.
    """
    if window is not None:
        check_int("autojudge: window", window, 1, LONGEST_DRAFT)
        if stop is not None:
            raise ValueError("autojudge: window and stop both say how much is drafted: pass one of them")
    return LossyPolicy(Judge(head, threshold), stop or Constant(window or WINDOW))


def sv(
    profile: Profile,
    companion: PreTrainedModel | str,
    gamma: int | None = None,
    exact: Exactness = SVFilter.exact,
    corrections: bool = SVFilter.corrections,
    fallback: bool = SVFilter.fallback,
) -> LossyPolicy:
    """SV: draft `gamma` tokens a row; strictly verify those for which a companion predicts that verification pays.

    Kim et al., Speculative Verification (huggingface.co/papers/2509.24328). Lossless, except with `exact="off"` in sampling.

    Args:
        profile (`Profile`): from `hf-lossy profile`, or `Profile.from_pretrained(…)`.
        companion (`PreTrainedModel` or `str`): the model that the profile was made with.
        gamma: drafted tokens in a round, at most the profiled maximum, which is the default.
        exact, corrections, fallback: see `SVFilter`.

    Raises: `TypeError` or `ValueError`, one line, for an invalid profile and for drafts longer than profiled.
    """
    filter = SVFilter(profile=profile, companion=companion, exact=exact, corrections=corrections, fallback=fallback)
    stop = Constant(profile.gamma if gamma is None else gamma)
    profile.check_length(stop.gamma)
    return LossyPolicy(stop=stop, filter=filter)


Sprinter, AutoJudge, SpeculativeVerification = sprinter, autojudge, sv  # as the papers write them


def _choose_threshold(head: Head, given: float | None, default: float) -> float:
    if given is None and isinstance(head, Head):
        given = head.config.threshold
    return default if given is None else given


register_method(
    "strict",
    recipe=strict,
    title="Speculative decoding",
    guarantee="lossless",
    paper="2211.17192",
    summary="Strict acceptance, and the draft lengths of the call.",
)
register_method(
    "svip",
    recipe=svip,
    title="SVIP",
    guarantee="lossless",
    paper="2411.18462",
    summary="Stop after a token whose draft entropy H says that acceptance is unlikely: √(c·H) > h, H in nats.",
)
register_method(
    "sprinter",
    recipe=sprinter,
    title="SPRINTER",
    guarantee="lossy",
    paper="2502.04557",
    needs=("head",),
    head_kind=HeadKind("acceptable", "predicting", "q ≤ λ·p, for any λ"),
    neutral={"threshold": 1.0},
    summary="Draft while the head says ≥ `threshold`, accept all drafted tokens but the last unchecked, verify that one.",
    ladder=("threshold", (0.95, 0.9, 0.8, 0.7, 0.5)),
)
register_method(
    "autojudge",
    recipe=autojudge,
    title="AutoJudge",
    guarantee="lossy",
    paper="2504.20039",
    needs=("head",),
    head_kind=HeadKind("important", None, "another token here changes the answer"),
    neutral={"threshold": 0.0},
    summary="Strict acceptance, but a mismatch that the head finds unimportant is kept, and the rest of the draft with it.",
    ladder=("threshold", (0.02, 0.05, 0.1, 0.2, 0.4)),
)
register_method(
    "specdec",
    recipe=specdec,
    title="SpecDec++",
    guarantee="lossless",
    paper="2405.19715",
    needs=("head",),
    head_kind=HeadKind("acceptable", "token", "min(1, p/q)"),
    summary="Stop where the head finds a rejection in the draft likely by now.",
)
register_method(
    "sv",
    recipe=sv,
    title="Speculative Verification",
    paper="2509.24328",
    needs=("profile", "companion"),
    guarantee="depends",
    condition='lossless; lossy in sampling with exact="off"',
    neutral={"exact": "full"},
    neutral_text='any but exact="off"',
    summary="Draft `gamma` tokens a row; a companion says which of them are worth the target's time; verify those strictly.",
)
