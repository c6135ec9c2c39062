"""The mode of autograd that a call's tensors allow, and what its models read in it before the first round."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..batch.processor_kinds import from_transformers
from ..engine.call import Call
from ..engine.loop import prefill
from ..models.cached_model import CachedModel
from ..models.distributed import is_sharded
from ..models.introspection import base_of


# Calls under way that need a module without checkpointing, by the module's `id`.
_without_checkpointing: dict[int, set[object]] = {}
_lock = threading.Lock()


@contextmanager
def call_context(call: Call, model: PreTrainedModel, escapes: bool | None = None) -> Iterator[None]:
    """Within this context a call's models may run, with the hooks of the call. `escapes`: what `tensors_escape` returned."""
    escapes = tensors_escape(call, model) if escapes is None else escapes
    assistant = None if call.stop_context is None else call.stop_context[1]
    # (`inference_mode(False)` will not do for tensors that escape: it switches gradients on.)
    with torch.no_grad() if escapes else torch.inference_mode(), ExitStack() as stack:
        for tap in filter(None, (call.rule_tap, *call.drafter.taps)):
            stack.enter_context(tap)
        stack.enter_context(checkpointing_disabled(model, assistant))
        yield


def read_prompts(call: Call, wholly: bool = False) -> None:
    """Feed the prompts to all models, as far as their first round does not; `wholly`: but for the last token, in any case."""
    call.positions.check(call.rows, call.name_row)
    for cached in _find_readers(call):
        prefill(cached, call.rows, call.clock, wholly)


def read_some(call: Call, most: int) -> bool:
    """Feed the models the next tokens of the prompts, all but the last of each: about `most`, padding counted; return whether all are read.

    A drafter that reads the target's states must see a prompt in one forward.
    """
    call.positions.check(call.rows, call.name_row)
    over = True
    for model in _find_readers(call):
        tokens, counts = call.rows.uncached_tokens(model.lengths)
        width = max(counts) - 1
        part = width if call.drafter.reads_target else min(width, max(most // len(counts), 1))
        if part:
            with call.clock.time("prefill"):
                model.feed(tokens[:, :part], [min(count - 1, part) for count in counts], keep=0)
        over &= part == width
    return over


def _find_readers(call: Call) -> list[CachedModel]:
    """Return the models that read the prompt before the first round."""
    rows, companion = call.rows, call.companion
    models = [call.target]
    if any(call.positions.room(rows, [1] * len(rows.row_id_list))):
        # A draft that is not needed yet reads the prompt with what it has to catch up with, unless it must have it at once (RoPE, graphs).
        models += [
            model
            for model in call.drafter.cached_models
            if not call.stop.begins_alone or model.needs_prefill or model.rope is not None
        ]
    if companion is not None and call.policy.filter.reads_companion(len(rows.row_id_list)):
        models.append(companion)
    return models


def tensors_escape(call: Call, model: PreTrainedModel) -> bool:
    """Return whether tensors may outlive the call, which then runs under `no_grad`; `inference_mode` is a tenth faster on small models.

    A cache of Transformers' goes back to the caller. A quantised model may keep what it makes at its first forward, and FSDP2 keeps the
    tensors that it gathers weights into. The caller's code may keep the tensors that it sees, change them, or take gradients by them.
    """
    models = [model] + ([] if call.stop_context is None else [call.stop_context[1]])
    models += [] if call.companion is None else [call.companion.model]
    keeps = any(getattr(base_of(each), "is_quantized", False) or is_sharded(each) for each in models)
    callers_code = call.processing.runs_callers_code or call.rows.runs_callers_code
    callers_code |= call.streamer is not None and not _keeps_nothing(call.streamer)
    return call.target.outlives_call or keeps or callers_code


def _keeps_nothing(streamer: BaseStreamer) -> bool:
    """Return whether a streamer is Transformers' or this package's, which keep no reference to their tokens."""
    return from_transformers(streamer) or type(streamer).__module__.partition(".")[0] == __name__.partition(".")[0]


@contextmanager
def checkpointing_disabled(*models: PreTrainedModel | None) -> Iterator[None]:
    """Within this context, models in training keep their cache, which gradient checkpointing would drop; no gradient is taken here.

    The modules belong to all threads: the last call that needs one without checkpointing switches it on again.
    """
    call, switched = object(), []
    try:  # around all that is to be undone: a stop from the keyboard may come between any two lines
        with _lock:
            for module in (
                part for model in models if model is not None and model.training for part in model.modules()
            ):
                if getattr(module, "gradient_checkpointing", False) or id(module) in _without_checkpointing:
                    switched.append(module)
                    _without_checkpointing.setdefault(id(module), set()).add(call)
                    module.gradient_checkpointing = False
        yield
    finally:
        with _lock:
            for module in switched:
                calls = _without_checkpointing.get(id(module), set())
                calls.discard(call)
                if not calls:
                    _without_checkpointing.pop(id(module), None)
                    module.gradient_checkpointing = True
