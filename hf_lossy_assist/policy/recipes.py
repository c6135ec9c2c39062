"""The published methods: recipes that return a `LossyPolicy`, and their registry entries."""

from collections.abc import Callable
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ..artifacts.head import Head
from ..artifacts.sv_profile import Profile
from ..filters.sv import Exactness, SVFilter
from ..registry import Guarantee, HeadKind, register_method
from ..rules.head_rules import AllButLast, Judge
from ..stops import DraftStop
from ..stops.confidence import SVIP, HeadStop, SpecDecPP, SVIPForm
from ..stops.constant import Constant
from .policy import LossyPolicy


T = TypeVar("T", bound=Callable[..., LossyPolicy])
WINDOW = 32  # tokens that AutoJudge drafts in a round


def method(name: str, *, guarantee: Guarantee, **entry: Any) -> Callable[[T], T]:
    """Register the decorated recipe."""
    return lambda recipe: register_method(name, recipe=recipe, guarantee=guarantee, **entry)


@method("strict", guarantee="lossless", title="Speculative decoding", paper="2211.17192")
def strict() -> LossyPolicy:
    """Strict acceptance, and the draft lengths of the call (Leviathan et al., huggingface.co/papers/2211.17192)."""
    return LossyPolicy()


@method("svip", guarantee="lossless", title="SVIP", paper="2411.18462")
def svip(
    h: float = SVIP.h, c: float = SVIP.c, form: SVIPForm = SVIP.form, max_draft: int = SVIP.max_draft
) -> LossyPolicy:
    """Stop after a token whose draft entropy H says that acceptance is unlikely: √(c·H) > h, H in nats.

    SVIP: strict acceptance. Lossless. Arguments as in `SVIP`.
    """
    return LossyPolicy(stop=SVIP(h, c, form, max_draft))


@method(
    "sprinter",
    guarantee="lossy",
    title="SPRINTER",
    paper="2502.04557",
    head_kind=HeadKind("acceptable", "predicting", "q ≤ λ·p, for any λ"),
    neutral={"threshold": 1.0},
    ladder=("threshold", (0.95, 0.9, 0.8, 0.7, 0.5)),
)
def sprinter(
    head: Head, threshold: float | None = None, max_draft: int = HeadStop.max_draft, patience: float = 0.0
) -> LossyPolicy:
    """Draft while the head says ≥ `threshold`, accept all drafted tokens but the last unchecked, verify that one.

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
    stop = HeadStop(head, _choose_threshold(head, threshold, HeadStop.threshold), max_draft, patience)
    return LossyPolicy(AllButLast(), stop)


@method(
    "autojudge",
    guarantee="lossy",
    title="AutoJudge",
    paper="2504.20039",
    head_kind=HeadKind("important", None, "another token here changes the answer"),
    neutral={"threshold": 0.0},
    ladder=("threshold", (0.02, 0.05, 0.1, 0.2, 0.4)),
)
def autojudge(
    head: Head, threshold: float | None = None, window: int | None = None, stop: DraftStop | None = None
) -> LossyPolicy:
    """Strict acceptance, but a mismatch that the head finds unimportant is kept, and the rest of the draft with it.

    Garipov et al., AutoJudge (huggingface.co/papers/2504.20039). **Lossy**: only a measurement on your task shows the loss.
    `threshold` 0 is bit-equal to strict acceptance with the same window, 1 accepts everything.

    Args:
        head (`Head`): from `hf-lossy fit autojudge`, or `Head.from_pretrained(…)`.
        threshold: a mismatch is accepted where P(important) < threshold; None: the head's (recall ≥ 90 % when it was trained).
        window: tokens drafted in a round, by default 32: longer than for strict acceptance, as more are accepted (the paper: 64).
        stop (`DraftStop`, *optional*): replaces the constant window, for example `SVIP()`.

    Raises: `TypeError` or `ValueError`, one line, for an unsuitable head and for values out of range.
    """
    if None not in (window, stop):
        raise ValueError("autojudge: window and stop both say how much is drafted: pass one of them")
    return LossyPolicy(Judge(head, threshold), stop or Constant(WINDOW if window is None else window))


@method(
    "specdec",
    guarantee="lossless",
    title="SpecDec++",
    paper="2405.19715",
    head_kind=HeadKind("acceptable", "token", "min(1, p/q)"),
)
def specdec(head: Head, threshold: float | None = None, max_draft: int = SpecDecPP.max_draft) -> LossyPolicy:
    """Stop where the head finds a rejection in the draft likely by now.

    SpecDec++: strict acceptance (Huang et al., huggingface.co/papers/2405.19715). Lossless. `threshold`: the paper's h; None: the
    head's, or 0.7.
    """
    return LossyPolicy(stop=SpecDecPP(head, _choose_threshold(head, threshold, SpecDecPP.threshold), max_draft))


@method(
    "sv",
    guarantee="depends",
    title="Speculative Verification",
    paper="2509.24328",
    condition='lossless; lossy in sampling with exact="off"',
    neutral={"exact": "full"},
    neutral_text='any but exact="off"',
)
def sv(
    profile: Profile,
    companion: PreTrainedModel | str,
    gamma: int | None = None,
    exact: Exactness = SVFilter.exact,
    corrections: bool = SVFilter.corrections,
    fallback: bool = SVFilter.fallback,
) -> LossyPolicy:
    """Draft `gamma` tokens a row; a companion says which of them are worth the target's time; verify those strictly.

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


def _choose_threshold(head: Head, threshold: float | None, default: float) -> float:
    if threshold is None and isinstance(head, Head):
        threshold = head.config.threshold
    return default if threshold is None else threshold
