"""A call with a policy: Transformers' `generate` with a `Runner` as decoding loop.

Transformers thus prepares prompts, processors, criteria and special tokens. Its errors about them are reduced to one line.
"""

import copy
import functools
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import StopStringCriteria, logits_process
from transformers.generation.streamers import BaseStreamer

from ..drafters.base import split_assistant_and_drafter
from ..models.compat import passed_as
from ..models.compiled.compilation import COMPILE_SETTINGS
from ..models.distributed import RankGroup, is_one_of_several
from ..models.introspection import looking_once
from ..policy.policy import LossyPolicy
from ..validation import one_line, shown
from .arguments import Settings, check_config
from .distributed_call import find_ranks, propagate_errors
from .draft_settings import DRAFT_SETTINGS, FROM_STATES, WITHOUT_MODEL, read_draft_settings, read_hints, read_ways
from .input_checks import refuse_arguments
from .model_checks import announce, warn_of_shared_scales
from .model_factory import why_no_rows
from .output import add_report, cuts_outputs
from .runner import Runner


LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
PACKAGE = Path(__file__).resolve().parent.parent
PROCESSORS = Path(logits_process.__file__).resolve()

signature_of = functools.cache(inspect.signature)  # reading one takes longer than a call's other checks


def name_arguments(
    generate: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, Any]:
    """Return all arguments of a call of `generate` by name. Raises: Python's `TypeError` for arguments that do not fit.

    A method with `*args` is assumed to pass them to Transformers' `generate`.
    """
    signature = signature_of(generate)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        signature = signature_of(GenerationMixin.generate)
    bound = signature.bind_partial(None, *args, **kwargs)  # None: the model
    return dict(list(zip(signature.parameters, bound.args, strict=False))[1:]) | bound.kwargs


def speculative_generate(
    model: PreTrainedModel, policy: LossyPolicy, runner_type: Callable[..., Runner] = Runner, /, **kwargs: object
) -> Any:
    """Implement `generate(..., lossy_policy=policy)` of an enabled model; keyword arguments as in `generate`."""
    synced = kwargs.get("synced_gpus")
    ranks = find_ranks(model, synced if isinstance(synced, bool) else None) if is_one_of_several() else None
    assistant = kwargs.get("assistant_model")
    with nullcontext() if ranks is None else propagate_errors(ranks), looking_once(model, assistant):
        runner, kwargs = _prepare(model, policy, runner_type, ranks, **kwargs)
        with one_line_errors(begun=lambda: runner.called, streamer=runner.streamer):
            out = type(model).generate(model, custom_generate=runner, **kwargs)
        return add_report(out, runner.reports) if cuts_outputs(model) else out


def _prepare(
    model: PreTrainedModel,
    policy: LossyPolicy,
    runner_type: Callable[..., Runner],
    ranks: RankGroup | None,
    /,
    **kwargs: Any,
) -> tuple[Runner, dict[str, object]]:
    """Check a call; return its runner and the remaining arguments for Transformers."""
    names = ("generation_config", "generator", "drafter", "hints")
    given, generator, drafter, hints = (kwargs.pop(name, None) for name in names)
    check_config(given)
    # Read only: as in Transformers, settings that a given config leaves open come from the model's.
    with one_line_errors(begun=lambda: False):
        config = copy.deepcopy(given) if given is not None else GenerationConfig()
        config.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
        refuse_arguments(model, kwargs, config)
    sampling = bool(kwargs.get("do_sample", config.do_sample))
    assistant, drafter = split_assistant_and_drafter(kwargs.pop("assistant_model", None), drafter)
    call_settings = Settings(kwargs, config, model.generation_config)
    ways = read_ways(call_settings, assistant is None and drafter is None)
    runner = runner_type(
        policy,
        assistant=assistant,
        streamer=kwargs.get("streamer"),
        tokenizer=kwargs.pop("tokenizer", None),
        assistant_tokenizer=kwargs.pop("assistant_tokenizer", None),
        settings=read_draft_settings(given, model.generation_config)
        | {name: kwargs.pop(name) for name in DRAFT_SETTINGS if name in kwargs}
        | {name: kwargs.get(name, getattr(config, name, None)) for name in COMPILE_SETTINGS},
        generator=generator,
        drafter=drafter,
    )
    runner.hints = read_hints("hints", hints, runner.tokenizer, model)
    runner.checked = runner.validate(model, None, ways, ranks=ranks, cache_name=passed_as(kwargs), inputs=dict(kwargs))
    policy.rule.check_mode(sampling)
    if ranks is None and (error := why_no_rows(model, runner.checked.draft.assistant)) is not None:
        raise error
    announce(policy)
    warn_of_shared_scales(policy, model, sampling)

    stop_strings = kwargs.get("stop_strings", config.stop_strings)
    if stop_strings is not None:
        if runner.tokenizer is None:
            raise ValueError("stop_strings=… needs the tokenizer to find them: pass tokenizer=… to generate as well")
        criteria = kwargs.pop("stopping_criteria", None) or []
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, stop_at(stop_strings, runner.tokenizer)])
    # These settings would make Transformers choose its assisted mode before it reaches the runner.
    kwargs |= dict.fromkeys((*WITHOUT_MODEL, *FROM_STATES, "stop_strings", *COMPILE_SETTINGS))
    given = copy.deepcopy(given)
    for name in [name for name in kwargs if hasattr(given, name)]:
        # Passing Transformers a config and settings is deprecated and warns, so they go into the config; but a None that the
        # model's config would replace must stay an argument.
        if kwargs[name] is not None or getattr(model.generation_config, name, None) is None:
            setattr(given, name, kwargs.pop(name))
    return runner, kwargs | {"generation_config": given}


def stop_at(texts: str | Sequence[str], tokenizer: PreTrainedTokenizerBase) -> StopStringCriteria:
    """Return Transformers' criterion. Raises: `ValueError` for a tokenizer that it does not support."""
    if len(texts) == 0:
        raise ValueError(f"stop_strings: expected a text or a list of texts, got {shown(texts)}: leave it out")
    try:
        return StopStringCriteria(tokenizer, texts)
    except (ValueError, LookupError) as error:
        raise ValueError(
            f"stop_strings: Transformers cannot look for texts among the tokens of this {type(tokenizer).__name__} ({one_line(error)}): "
            "leave it out, or stop with stopping_criteria=…"
        ) from error


@contextmanager
def one_line_errors(begun: Callable[[], bool], streamer: BaseStreamer | None = None) -> Iterator[None]:
    """Reduce errors that Transformers raises before `begun()`, and its processors at any time, to one line, inside the context.

    Errors of this package, of the caller's code (the `streamer` at any time), and out-of-memory errors are left unchanged.
    """
    try:
        yield
    except (Warning, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        innermost = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        if innermost.is_relative_to(PACKAGE) or (begun() and innermost != PROCESSORS):
            raise
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if streamer is not None and any(
            frame.f_locals.get("self") is streamer or _is_callers(frame) for frame in frames
        ):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        name = "" if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: "
        raise kind(f"generate cannot run with these arguments: {name}{one_line(error, 300)}") from error


def _is_callers(frame: FrameType) -> bool:
    """Return whether a frame runs the caller's code, not a library's or this package's."""
    file = frame.f_code.co_filename
    return not (file.startswith((*LIBRARIES, "<frozen")) or Path(file).resolve().is_relative_to(PACKAGE))
