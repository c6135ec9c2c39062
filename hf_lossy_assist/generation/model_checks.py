"""Checks of a call's models: errors for those that a text would silently go wrong with, and one-line warnings, once
each."""

import warnings
from collections.abc import Hashable, Mapping
from weakref import ref

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ..artifacts.conditions import read_sampling, read_shaping
from ..drafters.base import Drafter
from ..models.introspection import base_of, cached_per_model, device_of, vocabulary_of
from ..models.probe import FAILURES, why_not_blocks
from ..policy.policy import LossyPolicy, compute_fingerprint
from ..validation import listed, shown
from .draft_settings import DraftInputs


# Number and width of the probe's inputs; their first halves are equal.
PROBES, WIDTH = 4, 12
_warned: set[Hashable] = set()


# -- models -----------------------------------------------------------------------------------------------------------


def refuse_models(target: PreTrainedModel, assistant: PreTrainedModel | None) -> None:
    """Raise `TypeError` or `ValueError` for a draft that is no model, for a target whose blocks are not what its single
    tokens are, and for models with a learned prompt, which would not be fed."""
    if (reason := why_not_blocks(target)) is not None:
        name = type(base_of(target)).__name__
        raise ValueError(f"{name} cannot be decoded in blocks ({reason}): leave lossy_policy out")
    if assistant is not None and not isinstance(base_of(assistant), GenerationMixin):
        hint = f", AutoModelForCausalLM.from_pretrained({shown(assistant)})" if isinstance(assistant, str) else ""
        kind = type(assistant).__name__
        raise TypeError(f"assistant_model: expected a loaded Transformers model with generate(){hint}, got {kind}")
    for name, model in {"target": target, "assistant": assistant}.items():
        # PEFT's prompt learning wraps `generate` and swaps a method of the wrapped model.
        swapped = getattr(model, "__dict__", {}).get("prepare_inputs_for_generation")
        inside = getattr(swapped, "__self__", model) is not model
        if inside or getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(f"the {name} has a learned prompt (PEFT): use a LoRA, or leave lossy_policy out")


def _refuse_vocabularies(target: PreTrainedModel, draft: DraftInputs) -> None:
    """Raise `ValueError` for a draft with other token ids than the target's, as far as sizes and equal tokenizers
    tell."""
    size, draft_size = vocabulary_of(target), vocabulary_of(draft.assistant)
    # Makers pad one tokenizer's vocabulary to different multiples of 64 or so (Qwen2.5: 151 936 and 152 064).
    if abs(size - draft_size) <= 0.02 * max(size, draft_size):
        return
    sizes = f"the target has {size} token ids, the assistant {draft_size}: more than padding"
    if draft.tokenizer is None or draft.assistant_tokenizer is None:
        raise ValueError(
            f"{sizes}. Pass tokenizer=… and assistant_tokenizer=…, or a draft with the target's tokenizer"
        )
    # Both have the same token ids, so the sizes differ by padding, unless one model cannot read them.
    tokens = len(draft.assistant_tokenizer.get_vocab())
    if tokens > 1.02 * min(size, draft_size):
        name = "target" if size < draft_size else "assistant"
        line = f"{sizes}, and the tokenizers' {tokens} tokens are not the {name}'s"
        raise ValueError(f"{line}: pass the {name}'s own tokenizer")


# -- a draft under a policy -------------------------------------------------------------------------------------------


def check_draft(target: PreTrainedModel, draft: DraftInputs, policy: LossyPolicy) -> None:
    """Raise `ValueError` if there is nothing to draft with, or if the policy reads what this draft does not have."""
    drafter = draft.drafter
    if drafter is None and draft.assistant is None:
        raise ValueError("lossy_policy needs something to draft with: pass assistant_model=… or drafter=…")
    if draft.assistant is not None and not draft.other_tokenizer:
        _refuse_vocabularies(target, draft)
    if drafter is not None:
        _check_drafter(draft, drafter)
    name = "a draft with another tokenizer" if drafter is None else type(drafter).__name__
    has_probs = not draft.other_tokenizer and (drafter is None or drafter.gives_probs)
    has_states = not draft.other_tokenizer and (drafter is None or drafter.gives_states)
    asks_stop = drafter is None or drafter.asks_stop
    rule, stop = policy.rule, policy.stop
    kind, spec = type(rule).__name__, rule.features
    readers = {
        f"{kind} compares the target's distribution with the draft's": rule.needs_draft_probs and not has_probs,
        "the policy's filter compares distributions of the draft": not has_probs
        and policy.filter.companion_for(base_of(target)) is not None,
        f"the rule's head reads the {spec} (hf-lossy fit autojudge --features target reads the target "
        "alone)": not has_states and spec is not None and spec.reads("draft"),
        f"{kind} accepts unchecked what the policy's stop does not doubt": rule.trusts_stop
        and stop is not None
        and stop.adaptive
        and not asks_stop,
    }
    for reader, misses in readers.items():
        if misses:
            way_out = "pass an assistant_model with the target's tokenizer, or take another policy"
            raise ValueError(f"{reader}, and {name} has none for it: {way_out}")


def _check_drafter(draft: DraftInputs, drafter: Drafter) -> None:
    """Raise `ValueError` for a drafter without the draft model that it needs, and for a draft model that it would not
    read."""
    name = type(drafter).__name__
    if draft.other_tokenizer:
        raise ValueError(f"{name} drafts in the target's token ids, and the assistant has another tokenizer")
    if drafter.needs_assistant and draft.assistant is None:
        raise ValueError(f"{name} drafts with a draft model: pass assistant_model=… too")
    if not (drafter.needs_assistant or drafter.takes_assistant) and draft.assistant is not None:
        raise ValueError(f"{name} needs no draft model: leave assistant_model out, or pass CompositeDrafter({name}())")


# -- warnings ---------------------------------------------------------------------------------------------------------


def warn_once(key: Hashable, line: str, stacklevel: int = 3) -> None:
    """Warn, once for each key."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(line, UserWarning, stacklevel=stacklevel)


def announce(policy: LossyPolicy) -> None:
    """Warn once for each lossy policy."""
    if not policy.lossless:
        line = f"{policy}: this policy is lossy; the output may differ from the target's own"
        warn_once(str(policy), line, stacklevel=7)


def warn_of_policy_in_config(*configs: object) -> None:
    """Warn that a policy in a generation config, which may be a stranger's file, does not act."""
    if any(getattr(config, "lossy_policy", None) is not None for config in configs):
        warn_once("config", "lossy_policy in a generation config does not act: pass it to generate or enable", 6)


def warn_of_models(target: PreTrainedModel, assistant: PreTrainedModel | None) -> None:
    """Warn about a draft that is the target, and about models in training mode. `assistant` may be None."""
    models = {"target": base_of(target)} | ({} if assistant is None else {"assistant": base_of(assistant)})
    if models.get("assistant") is models["target"]:
        line = "the target is its own draft, so each drafted token costs what a token of the target costs"
        way_out = "pass a smaller model, or hf_lossy_assist.early_exit(target, layers)"
        warn_once(("draft", ref(models["target"])), f"{line}, and nothing is gained: {way_out}")
    for name, model in models.items():
        if model.training:
            line = f"the {name} is in training mode, where dropout changes logits with each forward: call eval() first"
            warn_once(("training", ref(model)), line)


def _warn_of_other_decoding(policy: LossyPolicy, sampling: bool) -> None:
    """Warn, once for each head, that it was trained for another kind of decoding than this call's."""
    here, there = ("sampling", "greedy decoding") if sampling else ("greedy decoding", "sampling")
    for head in policy.heads().values():
        if head.config.decoding.get("do_sample", sampling) != sampling:
            name = "the head" if head.source is None else f"the head {head.source}"
            command = "mine" if head.config.method == "autojudge" else "collect"
            line = (
                f"{name} was trained for {there}, and this is {here}: it knows these texts less well; hf-lossy "
                f"{command} {'--do-sample' if sampling else '--greedy'} makes data for them"
            )
            warn_once((head.digest, sampling), line)


def warn_of_doubts(
    policy: LossyPolicy, models: Mapping[str, object], config: GenerationConfig, new_tokens: int
) -> None:
    """Warn if the policy, models or decoding differ from those of its heads' training or its certificate.
    `new_tokens`: maximum of this call."""
    _warn_of_other_decoding(policy, bool(config.do_sample))
    if policy.certificate is None:
        return
    decoding = read_sampling(config) | read_shaping(config, bool(config.do_sample)) | {"max_new_tokens": new_tokens}
    doubts = policy.certificate.doubts(models, decoding, compute_fingerprint(policy))
    if doubts:
        line = f"this policy's certificate is of something else: {listed(doubts)}: it says nothing of this call"
        warn_once(tuple(doubts), line)


def warn_of_shared_scales(policy: LossyPolicy, target: PreTrainedModel, sampling: bool) -> None:
    """Warn that a quantised model makes a lossless policy inexact.

    PyTorch's dynamic quantisation scales a layer's whole input at once, so that a token's logits depend on later
    tokens; other schemes scale each token separately, or not at all.
    """
    if not policy.lossless:
        return
    # A companion affects what is drafted or verified; in greedy decoding, the target's choice does not depend on it.
    models = {"target": target, "companion": policy.filter.companion_for(base_of(target)) if sampling else None}
    for name, model in models.items():
        if model is not None and shares_scale(model):
            line = (
                f"the {name}'s activations are quantised by a scale that the tokens of a forward share, or may share "
                "(dynamic quantisation): its distributions depend on later tokens, and this policy is lossless only "
                "up to that; quantise its weights alone"
            )
            warn_once(("quantised", ref(base_of(model))), line, stacklevel=7)


@cached_per_model
def shares_scale(model: PreTrainedModel) -> bool:
    """Return whether later tokens change a token's logits in this causal model; False for one that is not quantised.

    True, too, for a quantised model that needs more than tokens, and so cannot be probed.
    """
    return _is_quantised(model) and _probe_later_tokens(model)


def _is_quantised(model: PreTrainedModel) -> bool:
    """Return whether a model says so, or a class of its modules and parameters has quantisation in its name."""
    # (A layer of torch whose name says that it cannot be quantised.)
    kinds = {type(x) for x in (*model.modules(), *model.parameters())} - {NonDynamicallyQuantizableLinear}
    names = {f"{kind.__module__}.{kind.__name__}" for kind in kinds}
    marked = bool(getattr(model, "is_quantized", False))
    return marked or any("quant" in name.lower() or "torchao" in name for name in names)


@torch.no_grad()
def _probe_later_tokens(model: PreTrainedModel) -> bool:
    size = min(vocabulary_of(model), 1000)
    ids = torch.arange(PROBES * WIDTH, device=device_of(model)).view(PROBES, 1, WIDTH) * 31 % size
    ids[:, :, : WIDTH // 2] = ids[:1, :, : WIDTH // 2]
    names = ("input_ids", "decoder_input_ids") if model.config.is_encoder_decoder else ("input_ids",)
    fixed = dict.fromkeys(names[:-1], ids[0])  # an encoder's tokens may attend to each other
    try:
        first, *others = [model(**fixed, **{names[-1]: one}).logits[0, : WIDTH // 2].float() for one in ids]
    except FAILURES:
        return True  # it needs more than tokens
    return any(float((one - first).abs().max()) > 1e-4 * float(first.abs().max()) for one in others)
