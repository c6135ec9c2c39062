"""`model.generate(..., lossy_policy=…)`: opt-in for one model object, nothing patched at import.

`enable(model)` puts a `generate` on the instance. With a policy it calls Transformers' own `generate` with
`custom_generate=` set to a `Runner`, so prompts, processors, criteria and special tokens are prepared by Transformers;
without one it calls Transformers' `generate` and nothing else. A policy that came with a model's files is never one by itself
(`policy_in`).
"""

import copy
import functools
import inspect
import warnings
from typing import Any

from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList
from transformers.generation import StopStringCriteria

from ..drafters.base import apart
from ..models.compat import passed_as
from ..models.distributed.sharded import RankGroup
from ..models.introspection import base_of
from ..policy.parse import as_policy
from ..policy.policy import LossyPolicy
from ..validation import one_line, shown
from .compiling import COMPILED
from .draft_settings import DRAFT_SETTINGS, FROM_STATES, LONGEST_NGRAM, WITHOUT_MODEL, read_draft_settings
from .output import with_report
from .preparing import refusals_in_one_line
from .runner import Runner
from .shared_scale import warn_of_shared_scales
from .spread import failures_told, ranks_of
from .unsupported import refuse_arguments
from .which_policy import NAME, policy_in, refuse_without_policy, without_policy


def enable(model: Any) -> Any:
    """Let this model object's `generate` take `lossy_policy=`; returns the model. Enabling twice changes nothing.

    For a PEFT model the Transformers model inside is enabled. Copies and pickles of an enabled model are enabled. `save_pretrained`
    leaves a policy out of generation_config.json.
    """
    base = base_of(model)
    if not isinstance(base, GenerationMixin):
        raise TypeError(f"enable(model): expected a Transformers model with generate(), got {type(model).__name__}")
    if not is_enabled(model):
        for kind in (Generate, SavePretrained):
            setattr(base, kind.name, kind(base))
    return model


def disable(model: Any) -> Any:
    """Undo `enable`; returns the model. Disabling a model that is not enabled changes nothing.

    The entry `lossy_policy` of its generation config goes too: Transformers takes an argument of `generate` whose name stands there as
    that entry, and would pass over a policy without a word.
    """
    base = base_of(model)
    if is_enabled(model):
        for kind in (Generate, SavePretrained):
            stock = vars(base).pop(kind.name).stock
            if stock is not None:
                setattr(base, kind.name, stock)
        vars(base.generation_config).pop(NAME, None)
    return model


def is_enabled(model: Any) -> bool:
    """True after `enable(model)`."""
    return isinstance(getattr(base_of(model), "__dict__", {}).get(Generate.name), Generate)


class OfOneModel:
    """A method of one model object in the place of its class's; the model's copies and pickles have one of their own."""

    name: str

    def __init__(self, model: Any):
        self.model = model
        self.stock = vars(model).get(self.name)  # a custom_generate repository may have put one there

    @property
    def __wrapped__(self) -> Any:  # signature and documentation are those of the class's method
        return getattr(type(self.model), self.name).__get__(self.model)


class Generate(OfOneModel):
    """`generate`, which takes `lossy_policy=`."""

    name = "generate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _generate(self.stock, self.model, *args, **kwargs)


class SavePretrained(OfOneModel):
    """`save_pretrained` without the policy in the generation config, which a model that was loaded and is not enabled would take no notice of."""

    name = "save_pretrained"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with without_policy(self.model.generation_config) as policy:
            if policy is not None:
                warnings.warn(
                    f"generation_config.json is written without the policy {shown(policy, 200)}, which would not act when it is read back: "
                    "save the policy by itself, policy.save_pretrained(folder)",
                    stacklevel=2,
                )
            return (self.stock or self.__wrapped__)(*args, **kwargs)


def _generate(
    stock: Any, self: Any, *args: Any, lossy_policy: Any = None, head: Any = None, profile: Any = None,
    companion: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Transformers' `generate`, or with a policy (here or in a generation config, see `policy_in`) the same with this package's loop.

    `head`, `profile`, `companion`: what the method that `lossy_policy` names needs, as `as_policy` takes them.
    """
    beside = {"head": head, "profile": profile, "companion": companion}
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    drafting = getattr(
        given, "is_assistant", False
    )  # Transformers' own loop asks for a draft: no policy of a config's applies to it
    if lossy_policy is None and not drafting:
        lossy_policy = policy_in(given, self.generation_config)
    if lossy_policy is None:
        refuse_without_policy(self, beside, kwargs)
        call = stock if stock is not None else functools.partial(type(self).generate, self)
        return call(*args, **kwargs)
    return speculative_generate(self, as_policy(lossy_policy, **beside), **by_name(type(self).generate, args, kwargs))


def by_name(generate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of the method `generate`, by name; one that takes `*args` hands them on to Transformers' own.

    Raises: `TypeError`, one line as Python's, for an argument given twice and for too many.
    """
    names: list[str] = []
    for parameter in inspect.signature(generate).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += list(inspect.signature(GenerationMixin.generate).parameters)[len(names) :]
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        names.append(parameter.name)
    placed = names[1:][: len(args)]  # but for the model
    if len(placed) < len(args):
        raise TypeError(f"generate: expected at most {len(placed)} arguments by place, got {len(args)}")
    for name in placed:
        if name in kwargs:
            raise TypeError(f"generate() got multiple values for argument {name!r}: by its place and by name")
    return dict(zip(placed, args, strict=True)) | kwargs


def speculative_generate(model: Any, policy: LossyPolicy, runner_type: type[Runner] = Runner, **kwargs: Any) -> Any:
    """What an enabled model's `generate(..., lossy_policy=policy)` does; keyword arguments are those of `generate`."""
    synced = kwargs.get("synced_gpus")
    ranks = ranks_of(model, synced if isinstance(synced, bool) else None)
    with failures_told(ranks):
        return _speculative_generate(model, policy, runner_type, ranks, **kwargs)


def _speculative_generate(
    model: Any,
    policy: LossyPolicy,
    runner_type: type[Runner],
    ranks: RankGroup | None,
    **kwargs: Any,
) -> Any:
    given, generator, drafter = (kwargs.pop(name, None) for name in ("generation_config", "generator", "drafter"))
    if given is not None and not isinstance(given, GenerationConfig):
        raise TypeError(f"generation_config: expected a GenerationConfig, got {type(given).__name__}")
    # For reading: as Transformers has it, what a given config leaves open comes from the model's own.
    with refusals_in_one_line(begun=lambda: False):
        config = copy.deepcopy(given) if given is not None else GenerationConfig()
        config.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
        refuse_arguments(model, kwargs, config)
    sampling = bool(kwargs.get("do_sample", config.do_sample))
    assistant, drafter = apart(kwargs.pop("assistant_model", None), drafter)
    ways = _ways_to_draft(kwargs, given, config, model.generation_config, assistant is None and drafter is None)
    runner = runner_type(
        policy,
        assistant=assistant,
        streamer=kwargs.get("streamer"),
        tokenizer=kwargs.pop("tokenizer", None),
        assistant_tokenizer=kwargs.pop("assistant_tokenizer", None),
        settings=read_draft_settings(given, model.generation_config)
        | {name: kwargs.pop(name) for name in DRAFT_SETTINGS if name in kwargs}
        | {name: kwargs.get(name, getattr(config, name, None)) for name in COMPILED},
        generator=generator,
        drafter=drafter,
    )
    runner.checked = runner.validate(model, None, ways, ranks=ranks, cache_name=passed_as(kwargs), inputs=dict(kwargs))
    policy.rule.check_mode(sampling)
    announce(policy)
    warn_of_shared_scales(policy, model, sampling)

    stop_strings = kwargs.get("stop_strings", config.stop_strings)
    if stop_strings is not None:
        if runner.tokenizer is None:
            raise ValueError("stop_strings=… needs the tokenizer to find them: pass tokenizer=… to generate as well")
        criteria = kwargs.pop("stopping_criteria", None) or []
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, stop_at(stop_strings, runner.tokenizer)])
    # A way to draft must not make Transformers choose its assisted mode before the runner is reached.
    kwargs |= dict.fromkeys((*WITHOUT_MODEL, *FROM_STATES, "stop_strings", *COMPILED))
    given = copy.deepcopy(given)
    for name in [name for name in kwargs if hasattr(given, name)]:
        # Handing Transformers a config and settings is deprecated and warns, so they join the config; but a None that the
        # model's own config would fill must stay at the call.
        if kwargs[name] is not None or getattr(model.generation_config, name, None) is None:
            setattr(given, name, kwargs.pop(name))
    with refusals_in_one_line(begun=lambda: runner.called, streamer=runner.streamer):
        out = type(model).generate(model, generation_config=given, custom_generate=runner, **kwargs)
    return with_report(out, runner.reports)


def _ways_to_draft(
    kwargs: dict[str, Any], given: Any, config: GenerationConfig, model_config: GenerationConfig, alone: bool
) -> dict[str, Any]:
    """Return the settings that `choose_draft` takes. `alone`: the call passes no assistant and no drafter."""
    # What the model's config says does not take the place of what the call drafts with.
    source = config if alone else given
    ways = {name: kwargs[name] if name in kwargs else getattr(source, name, None) for name in WITHOUT_MODEL}
    for name in FROM_STATES:
        ways[name] = getattr(given, name, None) if kwargs.get(name) is None else kwargs[name]
    if alone and all(value is None for value in ways.values()):
        ways["use_mtp"] = getattr(model_config, "use_mtp", None)
    return ways | {LONGEST_NGRAM: kwargs.get(LONGEST_NGRAM, getattr(config, LONGEST_NGRAM, None))}


def stop_at(texts: Any, tokenizer: Any) -> StopStringCriteria:
    """Transformers' criterion. Raises: `ValueError` for a tokenizer whose tokens it cannot tell apart."""
    if len(texts) == 0:
        raise ValueError(f"stop_strings: expected a text or a list of texts, got {shown(texts)}: leave it out")
    try:
        return StopStringCriteria(tokenizer, texts)
    except (ValueError, LookupError) as error:
        raise ValueError(
            f"stop_strings: Transformers cannot look for texts among the tokens of this {type(tokenizer).__name__} ({one_line(error)}): "
            "leave it out, or stop with stopping_criteria=…"
        ) from error


_announced: set[str] = set()


def announce(policy: LossyPolicy) -> None:
    """Say once for each policy that it is lossy."""
    if not policy.lossless and str(policy) not in _announced:
        _announced.add(str(policy))
        warnings.warn(
            f"{policy}: this policy is lossy; the output may differ from the target's own", UserWarning, stacklevel=6
        )
