"""Whether what the caller passed can draft for a target under a policy: each thing that cannot is refused in one line."""

from typing import Any

from ..drafters.base import Drafter
from ..models.introspection import base_of
from ..policy.policy import LossyPolicy
from .draft_settings import DraftInputs
from .pairs import refuse_vocabularies


def check_draft(target: Any, draft: DraftInputs, policy: LossyPolicy) -> None:
    """Refuse nothing to draft with, and a policy that reads what this draft does not have. Raises `ValueError`."""
    rule, spec, drafter = policy.rule, policy.rule.features, draft.drafter
    if drafter is None and draft.assistant is None:
        raise ValueError(
            "lossy_policy needs something to draft with: pass assistant_model=… (or drafter=…, or prompt_lookup_num_tokens=…)"
        )
    if draft.assistant is not None and not draft.other_tokenizer:
        refuse_vocabularies(target, draft.assistant)
    if drafter is not None:
        _check_drafter(target, draft, drafter, policy)
    if not draft.other_tokenizer:
        return
    if rule.needs_draft_probs:
        raise ValueError(
            f"{type(rule).__name__} compares the target's distribution with the draft's: it needs an assistant_model with the target's "
            "tokenizer (other tokenizers have no such distribution), or another rule"
        )
    if spec is not None and spec.reads("draft"):
        raise ValueError(
            f"the rule's head reads the {spec}: it needs a draft model with the target's tokenizer. Without one, use a head "
            "that reads the target alone (hf-lossy fit autojudge --features target)"
        )
    if policy.filter.companion_for(base_of(target)) is not None:
        raise ValueError(
            "the policy's filter compares distributions of the draft with a companion's: it needs a draft model with the target's tokenizer"
        )


def _check_drafter(target: Any, draft: DraftInputs, drafter: Drafter, policy: LossyPolicy) -> None:
    """Refuse a drafter without what it needs, or what the policy reads."""
    name, rule, spec = type(drafter).__name__, policy.rule, policy.rule.features
    way_out = "pass assistant_model=… in its place" if draft.assistant is None else "leave drafter=… out"
    if draft.other_tokenizer:
        raise ValueError(f"{name} drafts in the target's token ids, and the assistant has another tokenizer")
    if drafter.needs_assistant and draft.assistant is None:
        raise ValueError(f"{name} drafts with a draft model: pass assistant_model=… too")
    if not drafter.needs_assistant and draft.assistant is not None:
        raise ValueError(
            f"{name} needs no draft model, and assistant_model=… is given: leave one out, or pass CompositeDrafter({name}())"
        )
    if spec is not None and spec.reads("draft") and not drafter.gives_states:
        raise ValueError(
            f"the rule's head reads the {spec}, which {name} does not have: {way_out}, or use a head that reads the target alone "
            "(hf-lossy fit autojudge --features target)"
        )
    if rule.trusts_stop and policy.stop is not None and policy.stop.adaptive and not drafter.asks_stop:
        raise ValueError(
            f"{type(rule).__name__} accepts unchecked what the policy's stop does not doubt, and the stop sees no token that {name} "
            f"drafts by itself: {way_out}, or take a policy that verifies every token"
        )
    if drafter.gives_probs:
        return
    if policy.filter.companion_for(base_of(target)) is not None:
        raise ValueError(
            f"the policy's filter compares distributions of the draft, and {name} has none: pass a draft model, or a policy without a filter"
        )
    if rule.needs_draft_probs:
        raise ValueError(
            f"{type(rule).__name__} compares the target's distribution with the draft's, and {name} has none "
            f"(gives_probs = False): {way_out}, or take another rule"
        )
