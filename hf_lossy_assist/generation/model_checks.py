"""Checks of a call's models and helpers: errors for unsupported ones, and one-line warnings, once each."""

import functools
import inspect
import warnings
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..artifacts.conditions import read_sampling, read_shaping
from ..drafters.base import Drafter
from ..models.compat import CACHE
from ..models.encoder_decoder import reads_encoder
from ..models.introspection import base_of, device_of, remember, vocabulary_of
from ..policy.policy import LossyPolicy, compute_fingerprint
from ..validation import listed, shown
from .arguments import Settings
from .draft_settings import DraftInputs


# Number and width of the probe's inputs; their first halves are equal.
PROBES, WIDTH = 4, 12
_warned: set[Hashable] = set()


# -- models ---------------------------------------------------------------------------------------------------------------


def refuse_target(call: str, target: PreTrainedModel) -> None:
    """Raise `TypeError` unless `target` is a loaded model. `call`: the function's name, for the error."""
    if not isinstance(base_of(target), PreTrainedModel):
        raise TypeError(f"{call}: target: expected a model of Transformers, got {shown(target)}")


def refuse_models(target: PreTrainedModel, assistant: PreTrainedModel | None) -> None:
    """Raise `TypeError` or `ValueError` for models without weights or with a learned prompt, drafts that read no text, and mixed kinds."""
    models = {"target": target} if assistant is None else {"target": target, "assistant": assistant}
    for name, model in models.items():
        if _learns_prompt(model):
            raise ValueError(
                f"the {name} has a learned prompt (PEFT), which this loop does not feed: use an adapter such as LoRA, or drop lossy_policy"
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
        if device_of(model).type == "meta":  # offloaded models have a device
            raise ValueError(f"the {name} is on the meta device, without weights: load it with from_pretrained(…)")
        base = base_of(model)
        missing = remember(base, "missing", partial(_has_meta, base))
        for part, module in base_of(model).named_modules() if missing else ():
            weights = [weight for weight in module.parameters(recurse=False) if weight.is_meta]
            if weights and not hasattr(module, "_hf_hook"):  # accelerate's hook for offloaded weights
                raise ValueError(
                    f"the {name} has no weights in {part or 'its first module'} (meta device): load it with from_pretrained(…)"
                )


def _has_meta(base: PreTrainedModel) -> bool:
    return any(weight.is_meta for weight in base.parameters())


def _learns_prompt(model: PreTrainedModel) -> bool:
    """Return whether the model uses PEFT's prompt learning, which wraps `generate` and swaps a method of the wrapped model."""
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
def _reads_states(kind: type[PreTrainedModel]) -> bool:
    """Return whether it is a draft such as DFlash's or Gemma 4's, whose forward takes states of the target instead of a text."""
    names = inspect.signature(kind.forward).parameters
    return "input_ids" not in names or ("shared_kv_states" in names and CACHE not in names)


def _refuse_vocabularies(target: PreTrainedModel, draft: DraftInputs) -> None:
    """Raise `ValueError` for a draft with other token ids than the target's, as far as sizes and equal tokenizers tell."""
    size, draft_size = vocabulary_of(target), vocabulary_of(draft.assistant)
    # Makers pad one tokenizer's vocabulary to different multiples of 64 or so (Qwen2.5: 151 936 and 152 064).
    if abs(size - draft_size) <= 0.02 * max(size, draft_size):
        return
    sizes = f"the target has {size} token ids, the assistant {draft_size}: more than padding"
    if draft.tokenizer is None or draft.assistant_tokenizer is None:
        raise ValueError(
            f"{sizes}. Pass tokenizer=… and assistant_tokenizer=…, or choose an assistant with the target's tokenizer"
        )
    # Both have the same token ids, so the sizes differ by padding, unless one model cannot read them.
    tokens = len(draft.assistant_tokenizer.get_vocab())
    if tokens > 1.02 * min(size, draft_size):
        name = "target" if size < draft_size else "assistant"
        raise ValueError(
            f"{sizes}, and the tokenizers' {tokens} tokens are not the {name}'s: pass the {name}'s own tokenizer"
        )


def refuse_helpers(streamer: BaseStreamer | None, **tokenizers: object) -> None:
    """Raise `TypeError` for invalid streamers and tokenizers."""
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
    """Raise `ValueError` if there is nothing to draft with, or if the policy reads what this draft does not have."""
    rule, spec, drafter = policy.rule, policy.rule.features, draft.drafter
    if drafter is None and draft.assistant is None:
        raise ValueError(
            "lossy_policy needs something to draft with: pass assistant_model=… (or drafter=…, or prompt_lookup_num_tokens=…)"
        )
    if draft.assistant is not None and not draft.other_tokenizer:
        _refuse_vocabularies(target, draft)
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
    """Raise `ValueError` for a drafter without its requirements, or without what the policy reads."""
    name, rule, spec = type(drafter).__name__, policy.rule, policy.rule.features
    way_out = "pass assistant_model=… in its place" if draft.assistant is None else "leave drafter=… out"
    if draft.other_tokenizer:
        raise ValueError(f"{name} drafts in the target's token ids, and the assistant has another tokenizer")
    if drafter.needs_assistant and draft.assistant is None:
        raise ValueError(f"{name} drafts with a draft model: pass assistant_model=… too")
    if not (drafter.needs_assistant or drafter.takes_assistant) and draft.assistant is not None:
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


# -- warnings -----------------------------------------------------------------------------------------------------------


def _warn_once(key: Hashable, line: str, stacklevel: int = 3) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(line, UserWarning, stacklevel=stacklevel)


def announce(policy: LossyPolicy) -> None:
    """Warn once for each lossy policy."""
    if not policy.lossless:
        line = f"{policy}: this policy is lossy; the output may differ from the target's own"
        _warn_once(str(policy), line, stacklevel=7)


def warn_of_policy_in_config(*configs: object) -> None:
    """Warn that a policy in a generation config, which may be a stranger's file, does not act."""
    if any(getattr(config, "lossy_policy", None) is not None for config in configs):
        _warn_once("config", "lossy_policy in a generation config does not act: pass it to generate or enable", 6)


def warn_of_lookbehind(settings: Settings) -> None:
    """Warn that the lookbehind settings of a draft with another tokenizer have no effect."""
    for name in ("assistant_lookbehind", "target_lookbehind"):
        if settings.is_passed(name):
            _warn_once(name, f"{name} has no effect with lossy_policy, which tokenizes a fixed window anew", 7)


def warn_of_models(target: PreTrainedModel, assistant: PreTrainedModel | None) -> None:
    """Warn about a draft that is the target or larger, and about models in training mode. `assistant`: the draft model or None."""
    models = {"target": target} if assistant is None else {"target": target, "assistant": assistant}
    models = {name: base_of(model) for name, model in models.items()}
    if assistant is not None and (found := _compare_sizes(models["target"], models["assistant"])):
        way_out = "pass a smaller model, or hf_lossy_assist.early_exit(target, layers)"
        _warn_once(("draft", *map(ref, models.values())), f"{found} and nothing is gained: {way_out}")
    for name, model in models.items():
        if model.training:
            line = f"the {name} is in training mode, where dropout, if it has any, changes its logits from forward to forward: call eval() on it first"
            _warn_once(("training", ref(model)), line)


def _warn_of_other_decoding(policy: LossyPolicy, sampling: bool) -> None:
    """Warn, once for each head, that it was trained for another kind of decoding than this call's."""
    here, there = ("sampling", "greedy decoding") if sampling else ("greedy decoding", "sampling")
    for head in policy.heads().values():
        if head.config.decoding.get("do_sample", sampling) != sampling:
            name = "the head" if head.source is None else f"the head {head.source}"
            command = "mine" if head.config.method == "autojudge" else "collect"
            line = (
                f"{name} was trained for {there}, and this is {here}: it knows these texts less well; hf-lossy {command} "
                f"{'--do-sample' if sampling else '--greedy'} makes data for them"
            )
            _warn_once((head.digest, sampling), line)


def _compare_sizes(target: PreTrainedModel, draft: PreTrainedModel) -> str | None:
    """Return what a draft costs that is the target or larger, or None."""
    if draft is target:
        return "the target is its own draft, so each drafted token costs what a token of the target costs"
    counts = [remember(model, "weights", model.num_parameters) for model in (target, draft)]
    configs = [model.config.get_text_config(decoder=True) for model in (target, draft)]
    blocks = [getattr(c, "num_hidden_layers", 0) * getattr(c, "hidden_size", 0) ** 2 for c in configs]
    # Both: some quantised models do not hold their weights as parameters, so that their number is too small.
    if blocks[1] > blocks[0] and counts[1] > counts[0]:
        return f"the draft has {counts[1]:,} parameters and the target {counts[0]:,}, so each drafted token costs more than one of the target"
    return None


def warn_of_doubts(
    policy: LossyPolicy, models: Mapping[str, object], config: GenerationConfig, new_tokens: int
) -> None:
    """Warn if the policy, models or decoding differ from those of its heads' training or its certificate. `new_tokens`: maximum of this call."""
    _warn_of_other_decoding(policy, bool(config.do_sample))
    if policy.certificate is None:
        return
    decoding = read_sampling(config) | read_shaping(config, bool(config.do_sample)) | {"max_new_tokens": new_tokens}
    found = policy.certificate.doubts(models, decoding, compute_fingerprint(policy))
    if found:
        line = f"this policy's certificate is of something else: {listed(found)}: it says nothing of this call"
        _warn_once(tuple(found), line)


def warn_of_shared_scales(policy: LossyPolicy, target: PreTrainedModel, sampling: bool) -> None:
    """Warn that a quantised model makes a lossless policy inexact.

    PyTorch's dynamic quantisation scales a layer's whole input at once, so that a token's logits depend on later tokens; other schemes
    scale each token separately, or not at all.
    """
    if not policy.lossless:
        return
    target = base_of(target)
    # A companion affects what is drafted or verified; in greedy decoding, the target's choice does not depend on it.
    models = {"target": target, "companion": policy.filter.companion_for(target) if sampling else None}
    for name, model in models.items():
        key = None if model is None else ("quantised", ref(base_of(model)))
        if key is None or key in _warned:
            continue
        model, line = base_of(model), None
        shares = shares_scale(model)
        if shares is None:
            line = (
                f"the {name} is quantised and needs more than tokens, so nobody tried whether tokens behind change its logits: "
                "if its activations are quantised dynamically, this policy is lossless only up to that"
            )
        elif shares:
            effect = "what a block writes can differ from what generate writes"
            line = (
                f"the {name}'s activations are quantised by a scale that all tokens of a forward share (dynamic quantisation), so its distributions "
                f"depend on the tokens behind and {effect if name == 'target' else 'sampling is exact only up to that'}: quantise its weights alone"
            )
        if line is not None:
            _warn_once(key, line, stacklevel=7)


def shares_scale(model: PreTrainedModel) -> bool | None:
    """Return whether later tokens change a token's logits in this causal model; False for one that is not quantised.

    None for a quantised model that needs more than tokens, and so cannot be probed.
    """
    return remember(model, "shares a scale", lambda: is_quantised(model) and _probe_later_tokens(model))


def is_quantised(model: PreTrainedModel) -> bool:
    """Return whether a model says so, or a class of its modules and parameters has quantisation in its name."""
    # (A layer of torch whose name says that it cannot be quantised.)
    kinds = {type(part) for part in (*model.modules(), *model.parameters())} - {NonDynamicallyQuantizableLinear}
    names = {f"{kind.__module__}.{kind.__name__}" for kind in kinds}
    marked = bool(getattr(model, "is_quantized", False))
    return marked or any("quant" in name.lower() or "torchao" in name for name in names)


@torch.no_grad()
def _probe_later_tokens(model: PreTrainedModel) -> bool | None:
    table, config = model.get_input_embeddings().weight, model.config
    size = min(config.get_text_config(decoder=True).vocab_size, 1000)
    ids = torch.arange(PROBES * WIDTH, device=table.device).view(PROBES, 1, WIDTH) * 31 % size
    ids[:, :, : WIDTH // 2] = ids[:1, :, : WIDTH // 2]
    names = ("input_ids", "decoder_input_ids") if config.is_encoder_decoder else ("input_ids",)
    fixed = dict.fromkeys(names[:-1], ids[0])  # an encoder's tokens may attend to each other
    try:
        first = [model(**fixed, **{names[-1]: one}).logits[0, : WIDTH // 2].float() for one in ids]
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return None  # it needs more than tokens
    return any(float((one - first[0]).abs().max()) > 1e-4 * float(first[0].abs().max()) for one in first[1:])
