"""What a target, its draft and the helpers beside them must be: what cannot work is refused in one line."""

import functools
import inspect
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..drafters.base import Drafter
from ..models.compat import CACHE
from ..models.encoder_decoder import reads_encoder
from ..models.introspection import base_of, device_of, vocabulary_of
from ..policy.policy import LossyPolicy
from ..validation import shown
from .draft_settings import DraftInputs


# -- models ---------------------------------------------------------------------------------------------------------------


def refuse_target(call: str, target: PreTrainedModel) -> None:
    """Refuse what is not a loaded model. `call`: the function that it was given to. Raises `TypeError`."""
    if not isinstance(base_of(target), PreTrainedModel):
        raise TypeError(f"{call}: target: expected a model of Transformers, got {shown(target)}")


def refuse_models(target: PreTrainedModel, assistant: PreTrainedModel | None) -> None:
    """Refuse models without weights or with a learned prompt, drafts that do not read text, and two models of two kinds.

    Raises: `TypeError` or `ValueError`.
    """
    models = {"target": target} if assistant is None else {"target": target, "assistant": assistant}
    for name, model in models.items():
        if _learns_prompt(model):
            raise ValueError(
                f"the {name} has a learned prompt (PEFT), which this loop cannot feed: use an adapter such as LoRA, or drop lossy_policy"
            )
    if assistant is not None:
        _refuse_assistant(assistant)
        encodes, draft_encodes = (base_of(model).config.is_encoder_decoder for model in (target, assistant))
        if encodes != draft_encodes and not (encodes and reads_encoder(assistant)):
            kinds = {True: "an encoder-decoder", False: "a decoder-only model"}
            raise ValueError(
                f"the target is {kinds[encodes]}, the assistant {kinds[draft_encodes]}: they must be of one kind"
            )
    for name, model in models.items():
        if device_of(model).type == "meta":  # and not offloaded
            raise ValueError(f"the {name} is on the meta device, without weights: load it with from_pretrained(…)")
        missing = any(weight.is_meta for weight in base_of(model).parameters())
        for part, module in base_of(model).named_modules() if missing else ():
            weights = [weight for weight in module.parameters(recurse=False) if weight.is_meta]
            if weights and not hasattr(module, "_hf_hook"):  # by which accelerate brings offloaded weights
                raise ValueError(
                    f"the {name} has no weights in {part or 'its first module'} (meta device): load it with from_pretrained(…)"
                )


def _learns_prompt(model: PreTrainedModel) -> bool:
    """Return whether PEFT's prompt learning wraps a model: it hands `generate` on and swaps one method of the model inside."""
    swapped = getattr(model, "__dict__", {}).get("prepare_inputs_for_generation")
    inside = getattr(swapped, "__self__", model) is not model
    return inside or getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)


def _refuse_assistant(assistant: PreTrainedModel | str) -> None:
    base = base_of(assistant)
    kind: Any = type(base)
    if not isinstance(base, PreTrainedModel) or not isinstance(base, GenerationMixin):
        text = isinstance(assistant, str)
        hint = f": load it first, AutoModelForCausalLM.from_pretrained({shown(assistant)})" if text else ""
        raise TypeError(
            f"assistant_model: expected a loaded Transformers model with generate(), got {type(assistant).__name__}{hint}"
        )
    if not base.config.is_encoder_decoder and _reads_states(kind):
        raise ValueError(
            f"{kind.__name__} drafts from the target's hidden states or keys, which only Transformers' own assisted generation "
            "hands over: drop lossy_policy, or take a draft model that reads text alone"
        )


@functools.cache
def _reads_states(model: PreTrainedModel) -> bool:
    """Return True for drafts such as DFlash's and Gemma 4's, whose forward takes states of the target in place of a text."""
    names = inspect.signature(model.forward).parameters
    return "input_ids" not in names or ("shared_kv_states" in names and CACHE not in names)


def _refuse_vocabularies(target: PreTrainedModel, assistant: PreTrainedModel) -> None:
    """Refuse a draft whose token ids are not the target's."""
    size, draft_size = vocabulary_of(target), vocabulary_of(assistant)
    # One tokenizer is padded to a multiple of 64 or so by different makers (Qwen2.5: 151 936 and 152 064).
    if abs(size - draft_size) > 0.02 * max(size, draft_size):
        raise ValueError(
            f"the target has {size} token ids, the assistant {draft_size}: more than padding. "
            "Pass tokenizer=… and assistant_tokenizer=…, or choose an assistant with the target's tokenizer"
        )


def refuse_helpers(streamer: BaseStreamer | None, **tokenizers: object) -> None:
    """Refuse streamers that cannot be streamed to and tokenizers that are none. Raises `TypeError`."""
    if streamer is not None and not (callable(getattr(streamer, "put", None)) and hasattr(streamer, "end")):
        raise TypeError(
            f"streamer: expected an object with put() and end(), such as TextStreamer, got {shown(streamer)}"
        )
    for name, tokenizer in tokenizers.items():
        if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
            raise TypeError(
                f"{name}: expected a tokenizer, such as AutoTokenizer.from_pretrained(…), got {type(tokenizer).__name__} "
                f"{str(tokenizer)[:40]!r}"
            )


# -- a draft under a policy -----------------------------------------------------------------------------------------------


def check_draft(target: PreTrainedModel, draft: DraftInputs, policy: LossyPolicy) -> None:
    """Refuse nothing to draft with, and a policy that reads what this draft does not have. Raises `ValueError`."""
    rule, spec, drafter = policy.rule, policy.rule.features, draft.drafter
    if drafter is None and draft.assistant is None:
        raise ValueError(
            "lossy_policy needs something to draft with: pass assistant_model=… (or drafter=…, or prompt_lookup_num_tokens=…)"
        )
    if draft.assistant is not None and not draft.other_tokenizer:
        _refuse_vocabularies(target, draft.assistant)
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


def _check_drafter(target: PreTrainedModel, draft: DraftInputs, drafter: Drafter, policy: LossyPolicy) -> None:
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
