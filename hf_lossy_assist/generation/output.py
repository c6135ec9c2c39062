"""The outputs of `generate` with a policy: Transformers' outputs plus statistics."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..engine.call import Call
from ..engine.stages import new_tokens_first
from ..models.compat import CACHE
from ..stats.speculation import SpeculationStats


@dataclass
class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with statistics."""

    speculation: SpeculationStats | None = None


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput` with statistics."""

    speculation: SpeculationStats | None = None


def cuts_outputs(model: PreTrainedModel) -> bool:
    """Return True for Whisper, whose `generate` makes a call for each audio segment and splits every output field into rows."""
    return hasattr(type(model), "_postprocess_outputs")


class ReportInRows:
    """Statistics for outputs whose fields are split into rows and moved to the CPU: `self[b].cpu()` is row b's.

    Its `rows` contain row b alone; forwards and seconds are those of all rows together.
    """

    def __init__(self, stats: SpeculationStats):
        self.stats = stats

    def __getitem__(self, b: int) -> "ReportInRows":
        return ReportInRows(replace(self.stats, rows=[self.stats.rows[b]]))

    def cpu(self) -> SpeculationStats:
        """Return the statistics."""
        return self.stats


def add_report(output: object, calls: Sequence[SpeculationStats]) -> object:
    """Add the merged statistics of all `calls` to the output of Whisper's `generate`, as a field or a dict entry.

    `rows` has one entry for each decoded text: call by call, for the audio inputs that had not ended.
    """
    if calls and isinstance(output, SpeculativeEncoderDecoderOutput):
        output.speculation = SpeculationStats.merge(calls)
    elif calls and isinstance(output, dict):
        output["speculation"] = SpeculationStats.merge(calls)
    return output


def padding_id(config: GenerationConfig) -> int:
    """Return the padding token of a config that `generate` prepared."""
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


def with_report(output: object, stats: SpeculationStats) -> object:
    """Return an output of Transformers' loop with statistics; token ids alone as they are."""
    for kind in (SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput):
        if isinstance(output, kind.__mro__[1]):
            return kind(**{**vars(output), "speculation": stats})
    return output


def make_output(
    call: Call,
    model: PreTrainedModel,
    sequences: torch.Tensor,
    length: int,
    cache: Cache | None,
    stats: SpeculationStats,
) -> SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
    """Return the output of a finished call with `length` new tokens; `sequences` (B, width + length)."""
    ends = [end - call.rows.width for end in call.rows.ends()]
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": new_tokens_first(call.scores, length, ends) if call.keep_scores else None,
        "logits": new_tokens_first(call.logits, length, ends) if call.keep_logits else None,
        CACHE: cache,
        "speculation": ReportInRows(stats) if cuts_outputs(model) else stats,
    }
    kind = SpeculativeEncoderDecoderOutput if model.config.is_encoder_decoder else SpeculativeDecoderOnlyOutput
    return kind(**fields)
