"""What generate returns with a policy: Transformers' outputs, and what the speculation did."""

from dataclasses import dataclass
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

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
