"""The published methods as policies, policies by name, and what `lossy_policy=` may be."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artifacts.heads import Head
from ..artifacts.profile import Profile
from ..artifacts.references import load_parts
from ..filters.base import VerifyFilter
from ..filters.sv import Verification
from ..rules import AcceptanceRule, AllButLast, Judge
from ..stops import SVIP, Constant, DraftStop, HeadStop, SpecDecPP
from ..validation import LONGEST_DRAFT, check_int, shown
from .names import by_name
from .policy import LossyPolicy, parse, spec_in


class Sprinter(LossyPolicy):
    """SPRINTER: draft while the head V says ≥ `threshold`, accept all drafted tokens but the last unseen, verify that one.

    Zhong et al., "Speeding up Speculative Decoding via Sequential Approximate Verification"
    (huggingface.co/papers/2502.04557). **Lossy**: η_FP of the tokens that strict acceptance would doubt stay in the text.
    `threshold` above 1 doubts every token and is bit-equal to strict acceptance with γ = 1.

    Args:
        head (`Head`): from `hf-lossy fit sprinter`, or `Head.from_pretrained(…)`.
        threshold: τ; lower drafts longer and loses more. `hf-lossy plan` measures which one pays.
        max_draft: the most tokens of one round.
        patience: see `HeadStop`; matters in batches alone. 0, the default, ends the round for all rows when one stops: 1.15 ×
            strict acceptance in batches of 32 on the demo, where waiting for every row gives 0.80 × (docs/log.md). With 1 each
            row's greedy text is the one it would have alone.
    """

    def __init__(
        self, head: Head, threshold: float = HeadStop.threshold, max_draft: int = HeadStop.max_draft, patience: float = 0.0
    ):  # fmt: skip
        super().__init__(rule=AllButLast(), stop=HeadStop(head, threshold, max_draft, patience))


class AutoJudge(LossyPolicy):
    """AutoJudge: strict acceptance, but a mismatch that the head finds unimportant is kept, and the rest of the draft with it.

    Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039). **Lossy**: the
    output is no longer the target's; what that costs on your task only a measurement there can tell. `threshold` 0 is
    bit-equal to strict acceptance with the same window, 1 keeps everything.

    Args:
        head (`Head`): from `hf-lossy fit autojudge`, or `Head.from_pretrained(…)`.
        threshold: a mismatch is kept where P(important) < threshold; None takes the head's own (recall ≥ 90 % when it was made).
        window: tokens drafted a round, by default 32; longer than strict acceptance wants, for more of them are kept (the
            paper: 64, and in vLLM tuned for each pair of models).
        stop (`DraftStop`, *optional*): in place of a constant window, `SVIP()` for example.
    """

    def __init__(
        self, head: Head, threshold: float | None = None, window: int | None = None, stop: DraftStop | None = None
    ):  # fmt: skip
        if window is not None:
            check_int("AutoJudge.window", window, 1, LONGEST_DRAFT)
            if stop is not None:
                raise ValueError("AutoJudge: window and stop both say how much is drafted: pass one of them")
        super().__init__(rule=Judge(head, threshold), stop=stop or Constant(window or 32))


class SpeculativeVerification(LossyPolicy):
    """SV: draft `gamma` tokens a row, let a companion say which of them are worth the target's time, verify those strictly.

    Kim et al., "Speculative Verification" (huggingface.co/papers/2509.24328). Lossless, but for `exact="off"` in sampling.

    Args:
        profile (`Profile`): from `hf-lossy profile`, or `Profile.from_pretrained(…)`.
        companion (`PreTrainedModel` or `str`): the model that the profile was made with.
        gamma: drafted tokens a round, at most what was profiled; None takes that.
        exact, corrections, fallback: see `Verification`.
    """

    def __init__(
        self, profile: Profile, companion: Any, gamma: int | None = None, exact: str = "full", corrections: bool = True,
        fallback: bool = True,
    ):  # fmt: skip
        own = Verification(profile, companion, exact, corrections, fallback)
        stop = Constant(own.profile.gamma if gamma is None else gamma)
        own.profile.check_length(stop.gamma)
        super().__init__(stop=stop, filter=own)


POLICIES: dict[str, LossyPolicy] = {
    "strict": LossyPolicy(),
    "svip": LossyPolicy(stop=SVIP()),
}


# Policies that are nothing without a trained head.
METHODS: dict[str, type[Sprinter] | type[AutoJudge]] = {"sprinter": Sprinter, "autojudge": AutoJudge}


def of_head(head: Head) -> LossyPolicy:
    """The method that a head's polarity and position make it fit for, with its own settings."""
    if (head.config.polarity, head.config.features.position) == ("acceptable", "token"):
        return LossyPolicy(stop=SpecDecPP(head))
    return AutoJudge(head) if head.config.polarity == "important" else Sprinter(head)


def as_policy(given: Any) -> LossyPolicy:
    """What `lossy_policy=` accepts: a `LossyPolicy`, a rule, a stop or a filter alone, a trained head, a name (of a policy,
    or of a rule, stop or filter that needs no parameter), the JSON form as a dict or as text, the path of a JSON file or of a
    folder that `save_pretrained` wrote. A file, like a folder, names heads by its own sub-folders or by repositories on the Hub
    alone; a dict or a text may name any folder.

    Raises: `TypeError` or `ValueError`, one line with what was given and what there is.
    """
    if isinstance(given, LossyPolicy):
        return given
    if isinstance(given, AcceptanceRule):
        return LossyPolicy(rule=given)
    if isinstance(given, DraftStop):
        return LossyPolicy(stop=given)
    if isinstance(given, VerifyFilter):
        return LossyPolicy(filter=given)
    if isinstance(given, Mapping):
        return LossyPolicy.from_dict(given)
    if isinstance(given, Head):
        return of_head(given)
    # `os.path`, not `Path`: what is too long for a path is none there, and an error of the system here.
    if isinstance(given, Path) and os.path.isdir(given):
        return LossyPolicy.from_pretrained(given)
    if isinstance(given, str) and not given.lstrip().startswith("{") and os.path.isdir(given):
        return LossyPolicy.from_pretrained(given)
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".json")):
        path = Path(given)
        if not os.path.isfile(path):
            raise ValueError(f"lossy_policy: there is no file {shown(str(path), 300)}")
        spec = spec_in(path)
        load_parts(spec, str(path.parent), path.parent)  # the file may come from anybody, as a folder may
        return LossyPolicy.from_dict(spec)
    if isinstance(given, str):
        if given.lstrip().startswith("{"):
            return parse(given, "the text")
        if given in POLICIES:
            return POLICIES[given]
        if given in METHODS:
            raise ValueError(
                f"lossy_policy: {given} needs a head: pass {METHODS[given].__name__}(Head.from_pretrained(…)), on the "
                "command line --head"
            )
        if given == "sv":
            raise ValueError(
                "lossy_policy: sv needs a profile and a companion: pass SpeculativeVerification(Profile.from_pretrained(…), model), "
                "on the command line --profile and --companion"
            )
        if "/" in given:
            hint = f"; one on the Hub: LossyPolicy.from_pretrained({shown(given)})" if given.count("/") == 1 else ""
            raise ValueError(f"lossy_policy: there is no folder {shown(given)} here{hint}")
        return by_name(given, [*POLICIES, *METHODS, "sv"])
    if isinstance(given, type):
        raise TypeError(f"lossy_policy: got the class {given.__name__}; pass an object of it, {given.__name__}(…)")
    raise TypeError(
        f"lossy_policy: expected a LossyPolicy, a rule, a stop, a name, a dict or a JSON file, got {type(given).__name__}"
    )
