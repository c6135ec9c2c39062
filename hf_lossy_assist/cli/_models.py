"""Load what options name: target, draft, companion, policies, servers, prompts."""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import hf_lossy_assist as hla

from .. import policy, server
from ..registry import Names, find_entry
from ..tasks.prompts import CONTINUATIONS, PromptText, read_texts
from ..validation import DEMO, nearest, one_line, shown
from ._options import INT8, DraftOptions, LoadOptions, ModelOptions


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Draft: TypeAlias = PreTrainedModel | hla.Drafter | None
    Served: TypeAlias = tuple[PreTrainedModel, PreTrainedModel | None, PreTrainedTokenizerBase]
    Loaded: TypeAlias = tuple[PreTrainedModel, Draft, PreTrainedTokenizerBase]

# What decides a setting in place of `--set`, which would have no effect.
DECIDED = {
    name: f"the command decides it: pass --{name.replace('_', '-')}"
    for name in ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p")
} | dict.fromkeys(
    ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    "the policy decides it: pass a stop, such as --policy constant:gamma=5",
)


def load_served(models: ModelOptions, options: LoadOptions) -> "tuple[Served, hla.Drafter | None]":
    """Load target, draft and tokenizer, and a drafter; without names the demo's. Raises: `ValueError` or `OSError`, one line."""
    loaded, drafter = server.named_drafters.load_served(
        models.model, models.assistant, models.drafter, options.dtype, options.device
    )
    override(loaded[0], options.overrides)
    return loaded, drafter


def load_without_drafter(models: ModelOptions, options: LoadOptions) -> "Served":
    """Load target, draft and tokenizer as `load_served` does, in another process."""
    return load_served(models, options)[0]


def load_models(models: ModelOptions, options: LoadOptions) -> "Loaded":
    """Load target, draft and tokenizer; a drafter that needs no draft takes its place. Raises: `ValueError` or `OSError`, one line."""
    (target, draft, tokenizer), drafter = load_served(models, options)
    if drafter is not None and draft is not None:
        raise ValueError(
            f"--drafter {models.drafter} drafts beside a draft model: it is for hf-lossy generate and serve"
        )
    return target, draft if drafter is None else drafter, tokenizer


def load_target(models: ModelOptions, options: LoadOptions) -> "Loaded":
    """Load the target alone, with its tokenizer."""
    target, tokenizer = load_alone(models.model, options)
    return target, None, tokenizer


def load_drafts(
    models: DraftOptions, options: LoadOptions
) -> "tuple[PreTrainedModel, dict[str, PreTrainedModel | hla.Drafter], PreTrainedTokenizerBase]":
    """Load the target, its drafts by name and the tokenizer. Raises: `ValueError` or `OSError`, one line."""
    named, dtype = server.named_drafters, options.dtype
    names = models.assistants or ([DEMO] if models.demo else [])
    drafts: dict[str, PreTrainedModel | hla.Drafter] = {}
    if not names:
        target, alone, tokenizer = load_models(ModelOptions(model=models.model, drafter=models.drafter), options)
        assert alone is not None
        return target, {_shorten(str(models.drafter), drafts): alone}, tokenizer
    for name in names:  # before weights are read
        named.check_served(models.model, name, None, dtype, options.device)
    trained = None if models.drafter is None else named.load_trained(models.drafter)
    target, demo_draft, tokenizer = named.load_pair(models.model, None, dtype, options.device)
    override(target, options.overrides)
    for name in names:
        is_demo = name == DEMO and demo_draft is not None
        draft = demo_draft if is_demo else named.load_draft(name, target, dtype, str(target.device))
        drafts[_shorten(name, drafts)] = draft
    if trained is not None:
        drafts[_shorten(str(models.drafter), drafts)] = named.fit_drafter(trained, target, dtype)
    return target, drafts, tokenizer


def _shorten(name: str, others: Collection[str]) -> str:
    """Return a draft's name without its path, unless another has it."""
    short = Path(name).name if Path(name).is_dir() else name
    return short if short not in others else name if name not in others else f"{name} (drafter)"


def load_alone(model: str | None, options: LoadOptions) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load one model with its tokenizer; None: the demo's target."""
    alone, _, tokenizer = server.named_drafters.load_pair(model, None, options.dtype, options.device)
    override(alone, options.overrides)
    return alone, tokenizer


def load_companion(
    companion: str, target: "PreTrainedModel", draft: "Draft", tokenizer: "PreTrainedTokenizerBase"
) -> "PreTrainedModel":
    """Load a companion in the target's precision and on its device: `demo`, `int8` for the draft in int8, or a model's files."""
    from ..artifacts.identity import same_ids
    from ..models.packed_linears import int8

    if companion == DEMO:
        return hla.demo.load(target.dtype, target.device).companion
    if companion == INT8:
        if draft is None or isinstance(draft, hla.Drafter):
            raise ValueError(f"a companion {INT8} is the draft model in int8, and there is none: pass --assistant")
        return int8(draft)
    dtype = str(target.dtype).removeprefix("torch.")
    model, words = load_alone(companion, LoadOptions(dtype=dtype, device=str(target.device)))
    if not same_ids(tokenizer, words):
        raise ValueError(
            f"the companion {companion} has another tokenizer than the target: token ids mean other words"
        )
    return model


def read_policy(text: str, demo_models: bool) -> "hla.LossyPolicy":
    """Read a policy: a name, a short form, JSON, a folder or a Hub id. With the demo's models, methods have the demo's head and profile."""
    parse = policy.parse
    name = text.partition("+")[0].partition(":")[0]
    if demo_models and name in Names("method"):
        files = {
            "head": hla.demo.FOLDER / f"{name}_head",
            "profile": hla.demo.FOLDER / "sv_profile",
            "companion": DEMO,
        }
        for need in find_entry("method", name).needs:
            if need not in parse.list_parts(text)[0][1]:
                text = parse.add_parameter(text, name, need, str(files[need]))
    if text.count("/") == 1 and not parse.is_short_form(text) and text[:1] not in "{./~" and not Path(text).exists():
        return hla.LossyPolicy.from_pretrained(text)
    return hla.as_policy(text)


def with_companion(
    chosen: "hla.LossyPolicy", target: "PreTrainedModel", draft: "Draft", tokenizer: "PreTrainedTokenizerBase"
) -> "hla.LossyPolicy":
    """Return a policy whose filter has the companion that it names, loaded."""
    name = getattr(chosen.filter, "companion", None)
    if not isinstance(name, str):
        return chosen
    loaded: Any = {"companion": load_companion(name, target, draft, tokenizer)}
    return replace(chosen, filter=replace(chosen.filter, **loaded))


def override(target: "PreTrainedModel", settings: list[str] | None) -> None:
    """Write each NAME=VALUE into the target's generation config; a VALUE is JSON, or else text.

    Raises: `ValueError` or `TypeError`, one line, for an unknown name, one that something else determines, and an invalid value.
    """
    config = target.generation_config
    for text in settings or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set: expected NAME=VALUE such as num_beams=1, got {shown(text)}")
        if name in DECIDED:
            raise ValueError(f"--set {name}: {DECIDED[name]}")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        try:
            unknown = config.update(**{name: parsed})
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"--set {shown(text)}: {one_line(error)}") from None
        if unknown:
            raise ValueError(f"--set: {nearest('setting', name, vars(config))}")


def with_template(tokenizer: "PreTrainedTokenizerBase", prompts: list[str]) -> list[str]:
    """Apply the tokenizer's chat template to prompts, without the begin token that the tokenizer will add."""
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    try:
        texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    except Exception as error:  # the template is the model's program, and may raise any error
        why = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"--chat: the tokenizer's chat template failed ({why}): leave --chat out") from None
    begin = tokenizer.bos_token
    if begin and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        texts = [text.removeprefix(begin) for text in texts]
    return texts


def read_prompt_texts(
    prompts: str, limit: int | None, demo_limit: int, seed: int, names: Sequence[str] = CONTINUATIONS
) -> tuple[list[PromptText], str]:
    """Read `--prompts`, with continuations under one of `names`, and their name for records. The demo's are problems used neither in training the models nor in tests."""
    if prompts != DEMO:
        return read_texts(prompts, limit, names), Path(prompts).name
    problems = hla.demo.problems(demo_limit if limit is None else limit, seed, "calibration")
    return [PromptText(p.prompt, p.solution) for p in problems], name_demo_source(seed)


def name_demo_source(seed: int) -> str:
    """Return the name of the demo problems in records."""
    return f"the demo task, calibration problems of seed {seed}"
