"""The autograd mode of a call, and the prefill of its models before the first round."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from transformers import PreTrainedModel

from ..batch.callers_code import is_callers_streamer
from ..engine.call import Call
from ..engine.loop import prefill
from ..models.cached_model import CachedModel
from ..models.distributed import is_sharded
from ..models.introspection import base_of, is_one_of_several
from ..models.patching import Patch, installed


@contextmanager
def call_context(call: Call, model: PreTrainedModel, escapes: bool | None = None) -> Iterator[None]:
    """Enter the autograd mode and the hooks in which a call's models run. `escapes`: from `tensors_escape`."""
    escapes = tensors_escape(call, model) if escapes is None else escapes
    assistant = None if call.stop_context is None else call.stop_context[1]
    # (`inference_mode(False)` is no alternative for escaping tensors: it enables gradients.)
    with torch.no_grad() if escapes else torch.inference_mode(), ExitStack() as stack:
        for tap in filter(None, (call.rule_tap, *call.drafter.taps)):
            stack.enter_context(tap)
        stack.enter_context(checkpointing_disabled(model, assistant))
        yield


def read_prompts(call: Call, chunk: int | None = None) -> None:
    """Prefill the prompts except their last tokens, unless that is left to the first round.

    `chunk`: maximum tokens of a row in one forward; None: no limit.
    """
    call.positions.check(call.rows, call.name_row)
    for cached in _find_readers(call):
        if chunk is None or cached.reads_whole:  # a RoPE that changes with the length needs the whole prompt
            prefill(cached, call.rows, call.clock, call.drafter.drafts_at_once or chunk is not None)
    while chunk is not None and not read_some(call, chunk * len(call.rows.row_id_list)):
        pass


def read_some(call: Call, most: int) -> bool:
    """Prefill about `most` more prompt tokens, padding included, except the last of each prompt; return whether all are
    read.

    A drafter that reads the target's states must see a prompt in one forward.
    """
    call.positions.check(call.rows, call.name_row)
    all_read = True
    for model in _find_readers(call):
        tokens, counts = call.rows.uncached_tokens(model.lengths)
        width = max(counts) - 1
        block = width if call.drafter.reads_target else min(width, max(most // len(counts), 1))
        if block:
            with call.clock.time("prefill"):
                model.feed(tokens[:, :block], [min(count - 1, block) for count in counts], keep=0)
        all_read &= block == width
    return all_read


def _find_readers(call: Call) -> list[CachedModel]:
    """Return the models that read the prompt before the first round."""
    rows, companion = call.rows, call.companion
    models: list[CachedModel] = [call.target]
    if any(call.positions.room([1] * len(rows.row_id_list), rows.cached_lengths())):
        # A draft that is not needed yet prefills later, unless it must prefill at once (RoPE, graphs).
        models += [
            model
            for model in call.drafter.cached_models
            if not (call.stop.begins_alone or call.drafter.begins_alone) or model.needs_prefill or model.reads_whole
        ]
    if companion is not None and call.policy.filter.reads_companion(len(rows.row_id_list)):
        models.append(companion)
    return models


def tensors_escape(call: Call, model: PreTrainedModel) -> bool:
    """Return whether tensors may outlive the call. It then runs under `no_grad`; `inference_mode` is a tenth faster on
    small models.

    A quantised model may store results of its first forward, FSDP2 the tensors that it
    gathers weights into. The caller's code may store the tensors that it gets, change them, or use them with gradients.
    """
    models = [model] + ([] if call.stop_context is None else [call.stop_context[1]])
    models += [] if call.companion is None else [call.companion.model]
    keeps = any(getattr(base_of(model), "is_quantized", False) for model in models)
    keeps |= is_one_of_several() and any(map(is_sharded, models))
    callers_code = call.processing.runs_callers_code or call.rows.runs_callers_code
    callers_code |= call.streamer is not None and is_callers_streamer(call.streamer)
    return keeps or callers_code


def checkpointing_disabled(*models: PreTrainedModel | None) -> AbstractContextManager[None]:
    """Disable gradient checkpointing, which drops the caches of models in training, inside the context;
    no gradients are needed here."""
    modules = [module for model in models if model is not None and model.training for module in model.modules()]
    name = "gradient_checkpointing"
    patches = [Patch(module, name, False) for module in modules if hasattr(module, name)]
    return installed(patches) if patches else nullcontext()
