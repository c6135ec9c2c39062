"""What generate returns with a policy: Transformers' outputs, and what the speculation did."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..engine.call import Call
from ..engine.commit import new_tokens_first
from ..models.cache_name import CACHE
from ..stats.report import SpeculationStats


@dataclass
class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` and what the speculation did."""

    speculation: SpeculationStats | None = None


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput` and what the speculation did."""

    speculation: SpeculationStats | None = None


def cuts_outputs(model: Any) -> bool:
    """True for Whisper, whose `generate` cuts every field of an output into rows, which a report of the call is not."""
    return hasattr(type(model), "_postprocess_outputs")


def output_of(
    call: Call, model: Any, sequences: torch.Tensor, length: int, cache: Any, stats: SpeculationStats
) -> SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
    """The output of a finished call, whose texts have `length` new tokens; `sequences` (B, width + length)."""
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": new_tokens_first(call.scores, length) if call.keep_scores else None,
        "logits": new_tokens_first(call.logits, length) if call.keep_logits else None,
        CACHE: cache,
        "speculation": None if cuts_outputs(model) else stats,
    }
    kind = SpeculativeEncoderDecoderOutput if model.config.is_encoder_decoder else SpeculativeDecoderOnlyOutput
    return kind(**fields)
