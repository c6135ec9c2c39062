"""Ways to continue prompts that are compared: the target alone, Transformers' assisted generation, policies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from transformers import CompileConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StaticCache
from transformers.utils import ModelOutput

from ..drafters.base import Drafter
from ..enabling import enable
from ..generation.arguments import refuse_config
from ..models.facts import CACHE
from ..policy.policy import LossyPolicy


Draft: TypeAlias = PreTrainedModel | Drafter | Mapping[str, PreTrainedModel | Drafter]  # one, or by name
Loaded: TypeAlias = tuple[PreTrainedModel, Draft, PreTrainedTokenizerBase]
Write: TypeAlias = Callable[..., ModelOutput]
TARGET, STATIC = "target", "target compiled"
COMPILED, DRAFTED_BY = " compiled", " with "  # in an arm's name: suffix; between policy and draft if there are several
STATIC_DRAFTS = CACHE == "cache"  # since 5.24 Transformers' assisted generation supports a static cache
CONSTANT = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}


@dataclass(frozen=True)
class Arm:
    """One way to continue prompts.

    Args:
        kind: "target", "assisted" (Transformers', which takes one prompt at a time and does not report its calls of
            the target), or "policy".
        draft: name of what drafts.
        write: takes keyword arguments of `generate`, returns its output; None: of a run that has ended.
        optional: left out if it fails: Transformers cannot compile every model, and not every draft fits every policy.
    """

    name: str
    kind: Literal["target", "assisted", "policy"]
    lossless: bool = True
    draft: str | None = None
    write: Write | None = None
    policy: LossyPolicy | None = None
    optional: bool = False


def make_arms(
    target: PreTrainedModel,
    draft: Draft,
    policies: Mapping[str, LossyPolicy],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    gamma: int = 5,
    capacity: int | None = None,
    compiled: bool = False,
    assisted: bool = True,
) -> list[Arm]:
    """Return arms for the target alone, Transformers' prompt lookup, its assisted generation with and without its schedule, and each policy.

    Args:
        draft: one, or by name; several have arms `policy with name`, each left out if it refuses the policy.
        policies: by the name to list them under.
        tokenizer: the target's; heads and profiles refuse one that they were not made with.
        gamma: draft length of Transformers' prompt lookup, and of its assisted generation without its schedule.
        capacity: tokens of the longest text; adds an arm for the target compiled with a static cache.
        compiled: add a compiled form of each policy, and from Transformers 5.24 of its assisted generation with γ tokens.
        assisted: include Transformers' two, whose assisted generation has no drafters on the target's states.

    Raises: `ValueError`, one line, for two arms with one name, whose figures would be mixed, and for settings in the
        target's generation config that policies do not support.
    """
    refuse_config(target)
    stock = type(target).generate
    arms = [Arm(TARGET, "target", write=partial(stock, target))]
    if capacity is not None:
        arms.append(Arm(STATIC, "target", write=make_static_writer(target, capacity), optional=True))
    drafts = draft if isinstance(draft, Mapping) else {"": draft}
    several = len(drafts) > 1
    if assisted:
        lookup = partial(stock, target, prompt_lookup_num_tokens=gamma)
        arms.append(Arm(f"prompt lookup γ={gamma}", "assisted", write=lookup, optional=True))
    for label, model in drafts.items():
        if assisted and not isinstance(model, Drafter):
            suffix, fixed = (DRAFTED_BY + label) * several, {"num_assistant_tokens": gamma, **CONSTANT}
            writers = {f"assisted{suffix}": make_assisted_writer(target, model, {})}
            writers[f"assisted γ={gamma}{suffix}"] = make_assisted_writer(target, model, fixed)
            if compiled and STATIC_DRAFTS:
                write = make_assisted_writer(target, model, fixed, **static_settings())
                writers[f"assisted γ={gamma}{suffix}{COMPILED}"] = write
            for name, write in writers.items():
                optional = several or name.endswith(COMPILED)
                arms.append(Arm(name, "assisted", True, label or None, write=write, optional=optional))
    enable(target)
    forms = {"": {"disable_compile": True}} | ({COMPILED: {"compile_config": CompileConfig()}} if compiled else {})
    for label, model in drafts.items():
        for policy_name, policy in policies.items():
            for form, settings in forms.items():
                name = policy_name + (DRAFTED_BY + label) * several + form
                if name in {arm.name for arm in arms}:
                    raise ValueError(f"{name} is what another arm is called: write ./{name} for the folder")
                arguments = {**settings, "assistant_model": model, "lossy_policy": policy, "tokenizer": tokenizer}
                write = partial(target.generate, **arguments)
                arms.append(Arm(name, "policy", policy.lossless, label or None, write, policy, optional=several))
    return arms


def make_assisted_writer(
    target: PreTrainedModel, draft: PreTrainedModel, changes: Mapping[str, object], **how: object
) -> Write:
    """Return a writer for Transformers' assisted generation.

    Args:
        changes: to the draft's generation config. how: more arguments of `generate`.
    """
    stock, config = type(target).generate, draft.generation_config

    def write(**settings: object) -> ModelOutput:
        # A new config for each call, since Transformers' schedule and threshold modify it.
        draft.generation_config = GenerationConfig(**(config.to_diff_dict() | dict(changes)))
        try:
            return stock(target, assistant_model=draft, **how, **settings)
        finally:
            draft.generation_config = config

    return write


def static_settings(mode: str | None = None, one_width: bool = False) -> dict[str, object]:
    """Return the arguments with which Transformers' `generate` compiles the target's forwards on any device.

    mode: of `torch.compile`. one_width: all forwards after the prompt have the same number of tokens; else one graph
    serves all widths but the first draft's, since a graph for each width would exceed PyTorch's limit.
    """
    how = CompileConfig(mode=mode, fullgraph=one_width, dynamic=False if one_width else None)
    how._compile_all_devices = True  # otherwise Transformers compiles only on accelerators
    return {"cache_implementation": "static", "compile_config": how}


def make_static_writer(target: PreTrainedModel, capacity: int, mode: str | None = None) -> Write:
    """Return a writer for Transformers' compiled generate, on one static cache of `capacity` tokens for each batch size."""
    stock, caches = type(target).generate, dict[int, StaticCache]()
    how = static_settings(mode, one_width=True)["compile_config"]

    def write(**settings: Any) -> ModelOutput:
        rows = len(settings["input_ids"])
        cache = caches.setdefault(rows, StaticCache(config=target.config, max_cache_len=capacity))
        cache.reset()
        return stock(target, **{CACHE: cache}, compile_config=how, **settings)

    return write


def why_not_static(target: PreTrainedModel) -> str | None:
    """Return why Transformers cannot compile this model with a static cache, or None."""
    if not getattr(target, "_can_compile_fullgraph", False):
        return f"Transformers does not compile {type(target).__name__} with a static cache"
    return None
