"""The mode of autograd that a call's tensors allow, and what its models read in it before the first round."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..batch.processor_kinds import from_transformers
from ..engine.call import Call
from ..engine.loop import prefill
from ..models.cached_model import CachedModel
from ..models.distributed.sharded import is_sharded
from ..models.introspection import base_of
from ..models.reading import read_together, reads_together
from .pairs import without_checkpointing


@contextmanager
def in_the_right_mode(call: Call, model: Any, lasting: bool | None = None) -> Iterator[None]:
    """Within this context a call's models may run, with the hooks of the call. `lasting`: what `lasts` returned, if it was asked."""
    assistant = None if call.stop_context is None else call.stop_context[1]
    lasting = lasts(call, model) if lasting is None else lasting
    # (`inference_mode(False)` will not do where tensors last: it switches gradients on.)
    with torch.no_grad() if lasting else torch.inference_mode(), ExitStack() as stack:
        for tap in filter(None, (call.rule_tap, *call.drafter.taps)):
            stack.enter_context(tap)
        stack.enter_context(without_checkpointing(model, assistant))
        yield


def read_prompts(call: Call, wholly: bool = False) -> None:
    """All models read the prompts, as far as their first round does not; `wholly`: but for the last token, in any case."""
    call.positions.check(call.rows)
    for cached in _readers(call):
        prefill(cached, call.rows, call.clock, wholly)


def read_prompts_together(calls: Sequence[Call]) -> None:
    """As `read_prompts` wholly of each of these calls of one row, in one forward of each model where that can be."""
    readers = [_readers(call) for call in calls]
    same = len(calls) > 1 and len({len(its) for its in readers}) == 1
    if not same or not all(reads_together(models) for models in zip(*readers, strict=True)):
        for call in calls:
            read_prompts(call, wholly=True)
        return
    for call in calls:
        call.positions.check(call.rows)
    for models in zip(*readers, strict=True):
        texts = [call.rows.uncached_tokens(its.lengths)[0][0, :-1] for call, its in zip(calls, models, strict=True)]
        if any(len(text) for text in texts):
            with calls[0].clock.time("prefill"):
                read_together(models, texts)


def _readers(call: Call) -> list[CachedModel]:
    """The models that read the prompt before the first round."""
    rows, companion = call.rows, call.companion
    models = [call.target]
    if any(call.positions.room(rows, [1] * len(rows.row_id_list))):
        # A draft that is not needed yet reads the prompt with what it has to catch up with, unless it was told of it (RoPE, graphs).
        models += [
            its
            for its in call.drafter.cached_models
            if not call.stop.begins_alone or its.needs_prefill or its.rope is not None
        ]
    if companion is not None and call.policy.filter.reads_companion(len(rows.row_id_list)):
        models.append(companion)
    return models


def lasts(call: Call, model: Any) -> bool:
    """Whether tensors may outlive the call, which then runs under `no_grad`: `inference_mode` is faster by a tenth on small models.

    A cache of Transformers' goes back to the caller, and a quantised model may keep what it makes at its first forward; the caller's
    code may keep the tensors that it is shown, change them, or take gradients by them.
    """
    models = [model] + ([] if call.stop_context is None else [call.stop_context[1]])
    models += [] if call.companion is None else [call.companion.model]
    quantised = any(getattr(base_of(its), "is_quantized", False) for its in models)
    callers = call.processing.runs_callers_code or call.rows.runs_callers_code
    callers |= call.streamer is not None and not _keeps_nothing(call.streamer)
    sharded = any(map(is_sharded, models))  # FSDP2 gathers weights into tensors that it keeps
    return call.target.outlives_call or quantised or callers or sharded


def _keeps_nothing(streamer: Any) -> bool:
    """Whether a streamer is Transformers' or this package's, which look at a token and let go of it."""
    return from_transformers(streamer) or type(streamer).__module__.partition(".")[0] == __name__.partition(".")[0]
