"""What generate returns with a policy: Transformers' outputs, and what the speculation did."""

from dataclasses import dataclass

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
