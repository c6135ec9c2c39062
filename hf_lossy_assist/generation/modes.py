"""A call from its prompts to its last round, in the mode of autograd that its tensors allow."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ..batch.processing import from_transformers
from ..engine.call import Call
from ..engine.loop import prefill
from ..models.inspect import base_of
from ..stats.report import SpeculationStats
from .pairs import without_checkpointing


def in_the_right_mode(
    call: Call, model: Any, assistant: Any, decode: Callable[[Call], SpeculationStats]
) -> SpeculationStats:
    """The prompts of all models, then `decode`, with the hooks of the call."""
    rows, clock, companion = call.rows, call.clock, call.companion
    reads_companion = companion is not None and call.policy.filter.reads_companion(len(rows.index))
    # (`inference_mode(False)` will not do where tensors last: it switches gradients on.)
    with torch.no_grad() if lasts(call, model, assistant) else torch.inference_mode(), ExitStack() as stack:
        for tap in filter(None, (call.tap, call.drafter_tap, *call.drafter.taps)):
            stack.enter_context(tap)
        stack.enter_context(without_checkpointing(model, assistant))
        call.positions.check(rows)
        prefill(call.target, rows, clock)
        if any(call.positions.room(rows, [1] * len(rows.index))):
            for cached in call.drafter.cached_models:
                # A draft that is not needed yet reads the prompt with what it has to catch up with, unless it was told of it (RoPE, graphs).
                if not call.stop.begins_alone or cached.needs_prefill or cached.rope is not None:
                    prefill(cached, rows, clock)
        if companion is not None and reads_companion:
            prefill(companion, rows, clock)
        return decode(call)


def lasts(call: Call, model: Any, assistant: Any) -> bool:
    """Whether tensors may outlive the call, which then runs under `no_grad`: `inference_mode` is faster by a tenth on small models.

    A cache of Transformers' goes back to the caller, and a quantised model may keep what it makes at its first forward; the caller's
    code may keep the tensors that it is shown, change them, or take gradients by them.
    """
    models = model, assistant, None if call.companion is None else call.companion.model
    quantised = any(getattr(base_of(its), "is_quantized", False) for its in models)
    callers = call.processing.runs_callers_code or call.rows.runs_callers_code
    callers |= call.streamer is not None and not _keeps_nothing(call.streamer)
    return call.target.outlives_call or quantised or callers


def _keeps_nothing(streamer: Any) -> bool:
    """Whether a streamer is Transformers' or this package's, which look at a token and let go of it."""
    return from_transformers(streamer) or type(streamer).__module__.partition(".")[0] == __name__.partition(".")[0]
