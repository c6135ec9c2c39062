"""Which draft stop a call has: its settings win, then the policy's stop, then the draft's generation config."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from ..models.introspection import base_of
from ..policy.policy import LossyPolicy
from ..stops import DraftStop
from ..stops.confidence import Confidence
from ..stops.constant import Constant, Heuristic
from ..validation import LONGEST_DRAFT, check_int, check_number, shown


# Read at the call, then from the policy, then from the draft's generation config; never written anywhere.
DRAFT_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


def draft_stop(policy: LossyPolicy, assistant: Any, settings: Mapping[str, Any], lookup: int | None) -> DraftStop:
    """The stop of one call.

    Args:
        assistant (`PreTrainedModel`, *optional*): the draft model, whose generation config counts last.
        settings: the call's own, at it or in its generation config, by the names in `DRAFT_SETTINGS`.
        lookup: the call's `prompt_lookup_num_tokens`.

    Raises: `ValueError` or `TypeError`, one line, for a setting that cannot be, or stands beside a stop of the policy's.
    """
    own = base_of(assistant).generation_config if assistant is not None else GenerationConfig()
    at_call = {name: value for name, value in settings.items() if value is not None}
    if "num_assistant_tokens" in at_call:
        check_int("num_assistant_tokens", at_call["num_assistant_tokens"], 1, LONGEST_DRAFT)
    if policy.stop is not None:
        for name in DRAFT_SETTINGS[1:]:
            if name in at_call:
                raise ValueError(f"{name} is itself a draft stop, and the policy has one ({policy}): pass one of them")
        gamma = at_call.get("num_assistant_tokens")
        return policy.stop.with_longest(gamma) if gamma else policy.stop
    gamma, schedule, threshold = (at_call.get(name, getattr(own, name, None)) for name in DRAFT_SETTINGS)
    said = {name: name if name in at_call else f"{name} in the draft's generation config" for name in DRAFT_SETTINGS}
    if gamma is not None:
        check_int(said["num_assistant_tokens"], gamma, 1, LONGEST_DRAFT)
    if threshold:
        check_number(said["assistant_confidence_threshold"], threshold, 0.0, 1.0)
        return Confidence(threshold, gamma or Confidence.max_draft)
    if schedule in ("heuristic", "heuristic_transient"):
        return Heuristic(gamma or Heuristic.initial, max(gamma or 0, Heuristic.max_draft))
    if schedule not in (None, "constant"):
        raise ValueError(
            f'{said["num_assistant_tokens_schedule"]}: expected "constant" or "heuristic", got {shown(schedule)}'
        )
    return Constant(gamma or lookup or Constant.gamma)
