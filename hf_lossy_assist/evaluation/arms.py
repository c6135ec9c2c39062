"""Ways to continue prompts that are compared: the target alone, Transformers' assisted generation, policies."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StaticCache
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import ModelOutput

from ..batch.suffix_memory import IndexedText, SuffixMemory
from ..drafters.base import Drafter
from ..drafters.suffix import LONGEST_MATCH, SuffixDrafter
from ..enabling import enable
from ..generation.arguments import refuse_config
from ..models.facts import CACHE
from ..policy.policy import LossyPolicy
from ..rules.distributions import Distributions
from ..rules.pointwise import OwnRule, Pointwise


Draft: TypeAlias = PreTrainedModel | Drafter | Mapping[str, PreTrainedModel | Drafter]  # one, or by name
Loaded: TypeAlias = tuple[PreTrainedModel, Draft, PreTrainedTokenizerBase]
TARGET, STATIC = "target", "target compiled"
COMPILED, WITH = (
    " compiled",
    " with ",
)  # in an arm's name: suffix, and what separates policy and draft if there are several
TRUNCATED = "target as "  # prefix of an arm's name
STATIC_DRAFTS = CACHE == "cache"  # since 5.24 Transformers' assisted generation supports a static cache
CONSTANT = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}


@dataclass(frozen=True)
class Arm:
    """One way to continue prompts.

    Args:
        write: takes keyword arguments of `generate`, returns its output.
        kind: "target", "assisted" (Transformers'), "policy", "truncated" (the target restricted to the tokens that a rule keeps), or "oracle",
            which cannot be used in practice.
        one_by_one: takes one prompt at a time, whatever the batch size.
        prepare: takes keyword arguments of `generate`; called before timing starts.
        optional: left out if it fails, since Transformers cannot compile every model, and not every draft fits every policy.
        draft: name of what drafts.
        counted: a hook counts its calls of the target, which its output does not report.
    """

    name: str
    write: Callable[..., ModelOutput]
    kind: Literal["target", "assisted", "policy", "truncated", "oracle"]
    policy: LossyPolicy | None = None
    draft: str | None = None
    one_by_one: bool = False
    counted: bool = False
    optional: bool = False
    prepare: Callable[..., None] | None = None

    @property
    def lossless(self) -> bool:
        return self.kind != "truncated" and (self.policy is None or self.policy.lossless)


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
    """Return arms for the target alone, Transformers' assisted generation with its defaults and with γ tokens a round, and each policy.

    Args:
        draft: one, or by name; several have arms `policy with name`, each left out if it refuses the policy.
        policies: by the name to list them under.
        tokenizer: the target's; heads and profiles refuse one that they were not made with.
        capacity: tokens of the longest text; adds an arm for the target compiled with a static cache.
        compiled: add a compiled form of each policy, and of Transformers' assisted generation with γ tokens (from Transformers 5.24, whose
            assisted generation supports a static cache).
        assisted: include Transformers' assisted generation, which has no drafters on the target's states.

    Raises: `ValueError`, one line, for a policy with the name of another arm, since their figures would be mixed, and for settings in
        the target's generation config that policies do not support.
    """
    refuse_config(target)
    stock = type(target).generate
    arms = [Arm(TARGET, lambda **settings: stock(target, **settings), "target")]
    if capacity is not None:
        arms.append(Arm(STATIC, make_static_writer(target, capacity), "target", optional=True))
    fixed = {"num_assistant_tokens": gamma, **CONSTANT}
    stocks: dict[str, dict[str, object]] = {"assisted": {}, f"assisted γ={gamma}": fixed}
    for name in policies:
        if name in (TARGET, STATIC, *stocks):
            raise ValueError(
                f"{name} is what an arm is called that is measured beside the policies: write ./{name} for the folder"
            )
    drafts = draft if isinstance(draft, Mapping) else {"": draft}
    several = len(drafts) > 1
    for label, each in drafts.items():
        facts: dict[str, Any] = {"one_by_one": True, "counted": True, "draft": label or None}
        for name, settings in stocks.items() if assisted and not isinstance(each, Drafter) else ():
            name += (WITH + label) * several
            write = make_assisted_writer(target, each, settings)
            arms.append(Arm(name, write, "assisted", optional=several, **facts))
            if compiled and settings and STATIC_DRAFTS:
                write = make_assisted_writer(target, each, settings, **static_settings())
                arms.append(Arm(name + COMPILED, write, "assisted", optional=True, **facts))
    enable(target)
    forms = {"": {"disable_compile": True}} | ({COMPILED: {"compile_config": CompileConfig()}} if compiled else {})
    for label, each in drafts.items():
        beside = {"assistant_model": each} | ({} if tokenizer is None else {"tokenizer": tokenizer})
        for name, policy in policies.items():
            for form, how in forms.items():
                write = _make_policy_writer(target, policy, {**how, **beside})
                name_of_arm = name + (WITH + label) * several + form
                arms.append(Arm(name_of_arm, write, "policy", policy, draft=label or None, optional=several))
    return arms


def _make_policy_writer(
    target: PreTrainedModel, policy: LossyPolicy, how: Mapping[str, object]
) -> Callable[..., ModelOutput]:
    return lambda **settings: target.generate(lossy_policy=policy, **how, **settings)


def make_assisted_writer(
    target: PreTrainedModel, draft: PreTrainedModel, changes: Mapping[str, object], **how: object
) -> Callable[..., ModelOutput]:
    """Return a writer for Transformers' assisted generation. `changes`: to the draft's generation config. `how`: more arguments of `generate`."""
    stock, given = type(target).generate, draft.generation_config

    def write(**settings: object) -> ModelOutput:
        # A new config for each call, since Transformers' schedule and threshold modify it.
        draft.generation_config = GenerationConfig(**(given.to_diff_dict() | dict(changes)))
        try:
            return stock(target, assistant_model=draft, **how, **settings)
        finally:
            draft.generation_config = given

    return write


def static_settings(mode: str | None = None, one_width: bool = False) -> dict[str, object]:
    """Return the arguments with which Transformers' `generate` compiles the target's forwards on any device.

    mode: of `torch.compile`. one_width: all forwards after the prompt have the same number of tokens; else one graph serves all widths but the
    first draft's, since a graph for each width would exceed PyTorch's limit.
    """
    how = CompileConfig(mode=mode, fullgraph=one_width, dynamic=False if one_width else None)
    how._compile_all_devices = True  # otherwise Transformers compiles only on accelerators
    return {"cache_implementation": "static", "compile_config": how}


def make_static_writer(target: PreTrainedModel, capacity: int, mode: str | None = None) -> Callable[..., ModelOutput]:
    """Return a writer for Transformers' compiled generate, on one static cache of `capacity` tokens for each batch size."""
    stock, caches, how = (
        type(target).generate,
        dict[int, StaticCache](),
        static_settings(mode, one_width=True)["compile_config"],
    )

    def write(**settings: Any) -> ModelOutput:
        rows = len(settings["input_ids"])
        cache = caches.setdefault(rows, StaticCache(config=target.config, max_cache_len=capacity))
        cache.reset()
        return stock(target, **{CACHE: cache}, compile_config=how, **settings)

    return write


class Truncation(LogitsProcessor):
    """Leave the tokens that a rule keeps, and the likeliest: the distribution that a draft would be drawn from if the rule were all."""

    def __init__(self, rule: Pointwise):
        self.rule = rule

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Return the scores, (B, V) each."""
        keeps = self.rule.keeps(Distributions(scores.float(), None))
        keeps = keeps.scatter(1, scores.argmax(dim=-1, keepdim=True), True)
        return scores.masked_fill(~keeps, float("-inf"))


def make_truncated_arms(target: PreTrainedModel, policies: Mapping[str, LossyPolicy]) -> list[Arm]:
    """Return an arm for each policy whose rule accepts by the target's distribution alone: the target, sampled of what the rule keeps.

    Such a rule can lose to it in right answers (Revisiting Lossy Verification, huggingface.co/papers/2607.26627).
    """
    stock = type(target).generate

    def make_writer(rule: Pointwise) -> Callable[..., ModelOutput]:
        def write(*, temperature: float, top_k: int, top_p: float, **settings: Any) -> ModelOutput:
            # The rule reads what these leave, and Transformers runs them behind a caller's processors.
            processors: list[LogitsProcessor] = [TemperatureLogitsWarper(float(temperature))]
            if top_k > 0:
                processors.append(TopKLogitsWarper(top_k))
            if top_p < 1:
                processors.append(TopPLogitsWarper(float(top_p)))
            in_order = LogitsProcessorList([*processors, Truncation(rule)])
            return stock(target, logits_processor=in_order, temperature=1.0, top_k=0, top_p=1.0, **settings)

        return write

    return [
        Arm(f"{TRUNCATED}{name}", make_writer(policy.rule), "truncated")
        for name, policy in policies.items()
        if isinstance(policy.rule, Pointwise) and _truncates(policy.rule)
    ]


def _truncates(rule: Pointwise) -> bool:
    """Return whether a rule lets pass a set of tokens that the target's distribution tells."""
    by_set = type(rule).keeps is not Pointwise.keeps and type(rule).chance is Pointwise.chance
    return by_set and not rule.needs_draft_probs and "sampling" in rule.modes and not isinstance(rule, OwnRule)


def make_oracle_arm(target: PreTrainedModel, gamma: int) -> Arm:
    """Return the arm `oracle γ=…` of an enabled target: greedy calls that draft the next `gamma` tokens of the target's text.

    The text is written before timing starts, and drafts are copied from it without a model. They are wrong only where a text repeats its last 64
    tokens and then continues differently.
    """
    memory = SuffixMemory()
    drafter = SuffixDrafter(1, LONGEST_MATCH, float(gamma), gamma, memory)

    def prepare(**settings: Any) -> None:
        memory.clear()
        sequences = type(target).generate(target, **settings).sequences
        starts = settings["attention_mask"].argmax(dim=1).tolist()
        for row, start in zip(sequences.tolist(), starts, strict=True):
            text = IndexedText(drafter.min_match, drafter.max_match)
            text.extend(row[start:])
            memory.add(text)

    def write(**settings: Any) -> ModelOutput:
        return target.generate(
            assistant_model=drafter,
            lossy_policy="strict",
            num_assistant_tokens=gamma,
            disable_compile=True,
            **settings,
        )

    return Arm(f"oracle γ={gamma}", write, "oracle", prepare=prepare)


def why_not_static(target: PreTrainedModel) -> str | None:
    """Return why Transformers cannot compile this model with a static cache, or None."""
    if not getattr(target, "_can_compile_fullgraph", False):
        return f"Transformers does not compile {type(target).__name__} with a static cache"
    return None


@contextmanager
def counted_calls(model: PreTrainedModel) -> Iterator[list[int]]:
    """Count the forwards of `model` within the context; yield a list with the count."""
    count = [0]

    def add(*_: object) -> None:
        count[0] += 1

    handle = model.register_forward_pre_hook(add)
    try:
        yield count
    finally:
        handle.remove()
