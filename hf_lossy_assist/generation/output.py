"""The outputs of `generate` with a policy, which are Transformers' with statistics, and the results of
`generate_many`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..engine.call import Call, TokenLogprobs
from ..engine.stages import new_tokens_first
from ..models.facts import CACHE
from ..stats.clock import Clock, estimate_in_flight
from ..stats.speculation import COUNTS, SOURCES, SpeculationStats


LATEST = 4096  # forwards used to estimate the time of the target alone


@dataclass
class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with statistics."""

    speculation: SpeculationStats | None = None


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput` with statistics."""

    speculation: SpeculationStats | None = None


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


def make_output(
    call: Call,
    model: PreTrainedModel,
    sequences: torch.Tensor,
    length: int,
    cache: Cache | None,
    report: SpeculationStats | ReportInRows,
) -> SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
    """Return the output of a finished call with `length` new tokens; `sequences` (B, width + length)."""
    ends = [end - call.rows.width for end in call.rows.ends()]
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": new_tokens_first(call.scores, length, ends) if call.keep_scores else None,
        "logits": new_tokens_first(call.logits, length, ends) if call.keep_logits else None,
        CACHE: cache,
        "speculation": report,
    }
    kind = SpeculativeEncoderDecoderOutput if model.config.is_encoder_decoder else SpeculativeDecoderOnlyOutput
    return kind(**fields)


# -- of generate_many -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One finished text.

    Args:
        index: index of the prompt, from 0.
        token_ids: new tokens, including the end token.
        text: the new text, including a leading space, without special tokens; None without a tokenizer.
        speculation (`SpeculationStats`): of this text alone; without the seconds of forwards, which texts share.
        seconds: from the start of decoding to the end.
        logprobs: of each of `token_ids`, if requested.
        finish_reason: "stop" if an end token, a stop text or another criterion ended the text, "length" if a limit did.
    """

    index: int
    token_ids: list[int]
    text: str | None
    speculation: SpeculationStats
    seconds: float
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str = "length"

    def describe(self) -> dict[str, object]:
        """Return the text, its token ids, why it ended, each token's source and the counts, as JSON values."""
        row = self.speculation.rows[0]
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "token_sources": [SOURCES[source] for source in row.token_sources],
            "speculation": {name: getattr(row, name) for name in COUNTS},
        }


class FinishedTexts:
    """Statistics of all finished texts, in constant memory."""

    def __init__(self, clock: Clock):
        """`clock`: of the rounds with several texts."""
        self.clock = clock
        self.together: SpeculationStats | None = None
        self.apart: SpeculationStats | None = None

    def add(self, text: SpeculationStats, apart: bool = False) -> None:
        """Add a text; `apart`: it was decoded alone, with separate seconds."""
        if apart:
            self.apart = _summed(self.apart, text)
        else:
            self.together = _summed(self.together, text)
            self.clock.seconds()  # on a CUDA device: reads the measurements since the last text
            del self.clock.reads[:-LATEST]

    def stats(self) -> SpeculationStats | None:
        """Return the statistics of all texts with the seconds of all forwards so far; None if no text has finished."""
        together = self.together
        if together is not None:
            seconds = self.clock.seconds()
            alone = estimate_in_flight(self.clock.reads, together.rows[0].num_new_tokens, seconds.get("prefill", 0.0))
            together = replace(together, forwards=dict(self.clock.forwards), seconds=seconds, alone=alone)
        return _summed(together, self.apart)


def _summed(*calls: SpeculationStats | None) -> SpeculationStats | None:
    """Return the sum of the calls as one row, without the sources of tokens."""
    present = [call for call in calls if call is not None]
    if not present:
        return None
    out = SpeculationStats.merge(present)
    return replace(out, rows=[out.total()])
