"""Whether what the caller passed can draft for a target under a policy: each thing that cannot is refused in one line."""

from typing import Any

from ..drafters.base import Drafter
from ..models.introspection import base_of
from ..models.stock_exit import check_exit
from ..policy.policy import LossyPolicy
from ..validation import LONGEST_DRAFT, check_int
from .drafting import DraftWith
from .pairs import refuse_vocabularies


def refuse_draft(target: Any, given: DraftWith, policy: LossyPolicy) -> None:
    """Refuse nothing to draft with, two ways to draft, and settings that no candidate generator takes.

    Raises: `ValueError` or `TypeError`.
    """
    if given.drafter is not None:
        _refuse_drafter(target, given, given.drafter, policy)
    elif given.assistant is None and not given.candidates:
        raise ValueError(
            "lossy_policy needs something to draft with: pass assistant_model=… (or drafter=…, or prompt_lookup_num_tokens=…)"
        )
    if given.assistant is not None:
        if given.candidates:
            raise ValueError(f"assistant_model and {given.candidates[0]} are two ways to draft: pass one of them")
        if not given.other_tokenizer:
            refuse_vocabularies(target, given.assistant)
    if given.lookup is not None:
        check_int("prompt_lookup_num_tokens", given.lookup, 1, LONGEST_DRAFT)
    if given.exit is not None:
        check_exit(target, given.exit)


def _refuse_drafter(target: Any, given: DraftWith, drafter: Drafter, policy: LossyPolicy) -> None:
    """Refuse a drafter beside other ways to draft, or without what it needs."""
    name, spec = type(drafter).__name__, policy.rule.features
    if given.candidates:
        raise ValueError(f"drafter and {given.candidates[0]} are two ways to draft: pass one of them")
    if given.other_tokenizer:
        raise ValueError(f"{name} drafts in the target's token ids, and the assistant has another tokenizer")
    if drafter.needs_assistant and given.assistant is None:
        raise ValueError(f"{name} drafts with a draft model: pass assistant_model=… too")
    if spec is not None and spec.reads("draft") and not drafter.gives_states:
        raise ValueError(f"the rule's head reads the {spec}, which {name} does not have: leave drafter=… out")
    if policy.rule.trusts_stop and policy.stop is not None and policy.stop.adaptive and not drafter.asks_stop:
        raise ValueError(
            f"{type(policy.rule).__name__} accepts unchecked what the policy's stop does not doubt, and the stop sees no token that {name} "
            "drafts by itself: leave drafter=… out, or take a policy that verifies every token"
        )
    if not drafter.gives_probs and policy.filter.companion_for(base_of(target)) is not None:
        raise ValueError(
            f"the policy's filter compares distributions of the draft, and {name} has none: pass a draft model, or a policy without a filter"
        )
    if not drafter.needs_assistant and given.assistant is not None:
        raise ValueError(
            f"{name} needs no draft model, and assistant_model=… is given: leave one out, or pass CompositeDrafter({name}())"
        )


def refuse_missing(target: Any, given: DraftWith, policy: LossyPolicy) -> None:
    """Refuse a policy that reads what only a draft model with the target's tokenizer has. Raises `ValueError`."""
    rule, spec = policy.rule, policy.rule.features
    drafts = given.drafter is not None and given.drafter.gives_probs
    alone = (given.assistant is None and not drafts) or given.other_tokenizer
    if rule.needs_draft_probs and given.drafter is not None and not given.drafter.gives_probs:
        raise ValueError(
            f"{type(rule).__name__} compares the target's distribution with the draft's, and {type(given.drafter).__name__} has none "
            "(gives_probs = False): leave drafter=… out, or take another rule"
        )
    if rule.needs_draft_probs and alone:
        raise ValueError(
            f"{type(rule).__name__} compares the target's distribution with the draft's: it needs an assistant_model with the target's "
            "tokenizer (prompt lookup, early exit and other tokenizers have no such distribution), or another rule"
        )
    if spec is not None and spec.reads("draft") and alone:
        raise ValueError(
            f"the rule's head reads the {spec}: it needs a draft model with the target's tokenizer. Without one, use a head "
            "that reads the target alone (hf-lossy fit autojudge --features target)"
        )
    if given.other_tokenizer and policy.filter.companion_for(base_of(target)) is not None:
        raise ValueError(
            "the policy's filter compares distributions of the draft with a companion's: it needs a draft model with the target's tokenizer"
        )
