"""What generate returns with a policy: Transformers' outputs, and what the speculation did."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..engine.call import Call
from ..engine.commit import new_tokens_first
from ..models.compat import CACHE
from ..stats.speculation import SpeculationStats


@dataclass
class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` and what the speculation did."""

    speculation: SpeculationStats | None = None


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput` and what the speculation did."""

    speculation: SpeculationStats | None = None


def cuts_outputs(model: PreTrainedModel) -> bool:
    """Return True for Whisper, whose `generate` makes a call for each stretch of sound and cuts every field of its output into rows."""
    return hasattr(type(model), "_postprocess_outputs")


class ReportInRows:
    """A call's report where every field is cut into rows, each of which is moved to the CPU: `self[b].cpu()` is row b's.

    It has row b alone under `rows`; forwards and seconds are those of all rows together.
    """

    def __init__(self, stats: SpeculationStats):
        self.stats = stats

    def __getitem__(self, b: int) -> "ReportInRows":
        return ReportInRows(replace(self.stats, rows=[self.stats.rows[b]]))

    def cpu(self) -> SpeculationStats:
        """Return the report itself."""
        return self.stats


def add_report(output: object, calls: Sequence[SpeculationStats]) -> object:
    """Return what Whisper's `generate` returned, with one report of all its `calls`: as a field, or an entry of the dict that segments come in.

    `rows` has one entry for each text that was decoded: call by call, those of the sounds that had not ended yet.
    """
    if calls and isinstance(output, SpeculativeEncoderDecoderOutput):
        output.speculation = SpeculationStats.merge(calls)
    elif calls and isinstance(output, dict):
        output["speculation"] = SpeculationStats.merge(calls)
    return output


def padding_id(config: GenerationConfig) -> int:
    """Return the token after rows that are shorter than others, of a config that `generate` prepared."""
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


def make_output(
    call: Call,
    model: PreTrainedModel,
    sequences: torch.Tensor,
    length: int,
    cache: Cache | None,
    stats: SpeculationStats,
) -> SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
    """Return the output of a finished call with `length` new tokens; `sequences` (B, width + length)."""
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": new_tokens_first(call.scores, length) if call.keep_scores else None,
        "logits": new_tokens_first(call.logits, length) if call.keep_logits else None,
        CACHE: cache,
        "speculation": ReportInRows(stats) if cuts_outputs(model) else stats,
    }
    kind = SpeculativeEncoderDecoderOutput if model.config.is_encoder_decoder else SpeculativeDecoderOnlyOutput
    return kind(**fields)
