"""A call with a policy: Transformers' `generate` with a `Runner` as decoding loop.

Transformers thus prepares prompts, processors, criteria and special tokens. Its errors about them are reduced to one
line.
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
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation import StopStringCriteria, logits_process
from transformers.generation.streamers import BaseStreamer

from ..drafters.base import split_assistant_and_drafter
from ..models.compiled.compilation import COMPILE_SETTINGS
from ..models.distributed import RankGroup, find_ranks, propagate_errors
from ..models.facts import passed_as
from ..models.introspection import is_one_of_several, looking_once
from ..policy.policy import LossyPolicy
from ..validation import one_line, shown
from .arguments import Settings, complete_config, refuse_arguments
from .draft_settings import DRAFT_SETTINGS, MODEL_FREE_DRAFTS, STATE_DRAFTS, read_hints
from .model_checks import announce, warn_of_shared_scales
from .model_factory import why_no_rows
from .output import add_report
from .runner import Runner, cuts_outputs


LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
PACKAGE = Path(__file__).resolve().parent.parent
PROCESSORS = Path(logits_process.__file__).resolve()


@functools.cache
def signature_of(generate: Callable[..., object]) -> inspect.Signature:
    """Return the signature of a model's `generate`, or of Transformers' if it hands on its `*args`."""
    signature = inspect.signature(generate)
    hands_on = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    return inspect.signature(GenerationMixin.generate) if hands_on else signature


def name_arguments(
    generate: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, Any]:
    """Return all arguments of a call of `generate` by name.
    Raises: Python's `TypeError` for arguments that do not fit."""
    signature = signature_of(generate)
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
    passed, generator, drafter, hints = (
        kwargs.pop(name, None) for name in ("generation_config", "generator", "drafter", "hints")
    )
    with one_line_errors(begun=lambda: False):
        config = complete_config(passed, model.generation_config)  # read only
        refuse_arguments(model, kwargs, config)
    settings = Settings(dict(kwargs), config, model.generation_config)
    sampling = bool(settings["do_sample"])
    assistant, drafter = split_assistant_and_drafter(kwargs.pop("assistant_model", None), drafter)
    tokenizer, assistant_tokenizer = (kwargs.pop(name, None) for name in ("tokenizer", "assistant_tokenizer"))
    runner = runner_type(
        policy,
        assistant=assistant,
        streamer=kwargs.get("streamer"),
        tokenizer=tokenizer,
        assistant_tokenizer=assistant_tokenizer,
        generator=generator,
        drafter=drafter,
    )
    runner.hints = read_hints("hints", hints, tokenizer, model)
    for name in DRAFT_SETTINGS:
        kwargs.pop(name, None)
    runner.checked = runner.validate(model, settings, ranks=ranks, cache_name=passed_as(kwargs), inputs=dict(kwargs))
    policy.rule.check_mode(sampling)
    if ranks is None and (error := why_no_rows(model, runner.checked.draft.assistant)) is not None:
        raise error
    announce(policy)
    warn_of_shared_scales(policy, model, sampling)
    if settings["stop_strings"] is not None:
        criteria = kwargs.pop("stopping_criteria", None) or []
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, stop_at(settings["stop_strings"], tokenizer)])
    # These settings would make Transformers choose its assisted mode before it reaches the runner.
    kwargs |= dict.fromkeys((*MODEL_FREE_DRAFTS, *STATE_DRAFTS, "stop_strings", *COMPILE_SETTINGS))
    passed = copy.deepcopy(passed)
    for name in [name for name in kwargs if hasattr(passed, name)]:
        # Passing Transformers a config and settings is deprecated and warns, so they go into the config; but a None
        # that the model's config would replace must stay an argument.
        if kwargs[name] is not None or getattr(model.generation_config, name, None) is None:
            setattr(passed, name, kwargs.pop(name))
    return runner, kwargs | {"generation_config": passed}


def stop_at(texts: str | Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> StopStringCriteria:
    """Return Transformers' criterion. Raises: `ValueError` without a tokenizer, or for one that it does not support."""
    if tokenizer is None:
        raise ValueError("stop_strings=… needs the tokenizer to find them: pass tokenizer=… as well")
    if len(texts) == 0:
        raise ValueError(f"stop_strings: expected a text or a list of texts, got {shown(texts)}: leave it out")
    try:
        return StopStringCriteria(tokenizer, texts)
    except (ValueError, LookupError) as error:
        line = f"Transformers cannot look for texts among the tokens of this {type(tokenizer).__name__}"
        way_out = "leave it out, or stop with stopping_criteria=…"
        raise ValueError(f"stop_strings: {line} ({one_line(error)}): {way_out}") from error


@contextmanager
def one_line_errors(begun: Callable[[], bool], streamer: BaseStreamer | None = None) -> Iterator[None]:
    """Reduce errors that Transformers raises before `begun()`, and its processors at any time, to one line, inside the
    context.

    Errors of this package, of the caller's code (the `streamer` at any time), and out-of-memory errors are left
    unchanged.
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
