"""Calls of Transformers' `generate` with a policy in its assisted generation, one row, for models that cannot be decoded in rows."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..drafters.base import Drafter
from ..generation.arguments import find_other_inputs
from ..generation.draft_settings import DRAFT_SETTINGS, MODEL_FREE_DRAFTS, STATE_DRAFTS
from ..generation.model_checks import warn_once
from ..generation.output import SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput
from ..generation.runner import Runner
from ..generation.speculative import one_line_errors
from ..models.cached_model import NotInRows
from ..models.distributed import is_one_of_several
from ..models.facts import passed_as
from ..models.introspection import base_of
from ..models.multimodal import EMBEDDINGS
from ..models.probe import why_not_assisted
from ..stats.speculation import SpeculationStats
from .attach import TransformersLoop, entered


class PromptSeen(BaseStreamer):
    """A streamer that has received the prompt already."""

    def __init__(self, streamer: BaseStreamer):
        self.streamer, self.waits = streamer, True

    def put(self, value: torch.Tensor) -> None:
        if not self.waits:
            self.streamer.put(value)
        self.waits = False

    def end(self) -> None:
        self.streamer.end()


def assist(
    generate: Callable[..., object],
    runner: Runner,
    model: PreTrainedModel,
    arguments: Mapping[str, Any],
    error: NotInRows,
) -> object:
    """Call Transformers' `generate` with a runner's policy in its assisted loop; return its output.

    Args:
        generate: the model's method of Transformers.
        runner: made for the call; it gets the report, and whether the loop has begun.
        arguments: of the call, by name, checked as for this package's loop.
        error: why that loop cannot run it.

    Raises: `ValueError`, one line, for what that loop cannot do either.
    """
    arguments = dict(arguments)
    if runner.checked is not None and not runner.checked.draft.other_tokenizer:
        arguments.pop("assistant_tokenizer", None)
    _refuse(model, arguments, error)
    settings = {name: arguments.pop(name) for name in DRAFT_SETTINGS if name in arguments}
    way_out = f"{error.reason}, so pass one prompt without hidden tokens, and a draft model"
    loop = TransformersLoop(runner.policy, settings, way_out)
    try:
        with entered(base_of(model), loop), one_line_errors(lambda: loop.drafts, arguments.get("streamer")):
            out = generate(**arguments)
    finally:
        runner.begun = loop.drafts
    if not loop.drafts:
        return out
    line = f"{error.reason}: Transformers' own assisted loop runs the policy, one row a call"
    warn_once((ref(base_of(model)), error.reason), line, 6)
    runner.reports = [loop.speculation]
    return _with_report(out, loop.speculation)


def _with_report(output: object, stats: SpeculationStats) -> object:
    """Return an output of Transformers' loop with statistics; token ids alone as they are."""
    for kind in (SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput):
        if isinstance(output, kind.__mro__[1]):
            return kind(**{**vars(output), "speculation": stats})
    return output


def _refuse(model: PreTrainedModel, arguments: Mapping[str, Any], error: NotInRows) -> None:
    """Raise `ValueError` for what Transformers' loop would ignore, or write differently."""
    names = (EMBEDDINGS, "drafter", "generator", "hints", "assistant_tokenizer", *MODEL_FREE_DRAFTS, *STATE_DRAFTS)
    unread = [name for name in names if arguments.get(name) is not None and arguments[name] is not False]
    base = base_of(model)
    if not base.config.is_encoder_decoder:
        unread += find_other_inputs(arguments, model.generation_config)
    elif all(arguments.get(name) is None for name in ("inputs", base.main_input_name)):
        unread += [name for name in ("encoder_outputs",) if arguments.get(name) is not None]
    cache, draft = passed_as(arguments), arguments.get("assistant_model")
    if is_one_of_several():
        raise ValueError(
            f"{error.reason}, and Transformers' own assisted loop with a policy runs in one process: leave lossy_policy out"
        )
    if unread or cache is not None:
        raise ValueError(
            f"{error.reason}, and {unread[0] if unread else cache}=… is for rows: leave it out, or lossy_policy"
        )
    if draft is None or isinstance(draft, Drafter):
        raise ValueError(
            f"{error.reason}, and Transformers' own assisted loop needs a draft model: pass assistant_model=…"
        )
    if base_of(draft).config.is_encoder_decoder and not base.config.is_encoder_decoder:
        raise ValueError(f"{error.reason}, and drafts for no decoder: choose an assistant_model of the target's kind")
    if (reason := why_not_assisted(model)) is not None:
        raise ValueError(f"{error.reason}, nor in Transformers' own assisted loop ({reason}): leave lossy_policy out")
