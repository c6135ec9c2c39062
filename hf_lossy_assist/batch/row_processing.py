"""Logits processors for rows that join and leave: one pass for all rows if they do not depend on the prompt, else one per row."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .logits_processing import Processing
from .processor_kinds import WARPERS, is_function


# Attributes of Transformers' processors that count from the prompt's length.
COUNTED = {
    "MinNewTokensLengthLogitsProcessor": "prompt_length_to_skip",
    "ExponentialDecayLengthPenalty": "regulation_start",
    "SuppressTokensAtBeginLogitsProcessor": "begin_index",
}
OF_PROMPT = {*COUNTED, "StructuredOutput", "MinLengthLogitsProcessor", "ForcedEOSTokenLogitsProcessor"} | {
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
}
# Placed after the caller's processors by `generate`.
LAST = {kind.__name__ for kind in WARPERS} | {"TopHLogitsWarper", "WatermarkLogitsProcessor", "LogitNormalization"}


def is_made_anew(processor: object) -> bool:
    """Return whether `for_prompt` can adapt a Transformers processor to another prompt."""
    # It forces the first token after a prompt of one token, which moves the position where other processors begin.
    return is_function(processor) and type(processor).__name__ != "ForcedBOSTokenLogitsProcessor"


def for_prompt(processor: Any, prompt: torch.Tensor, more: int, max_length: int, counts_new: bool) -> Any:
    """Return the processor that `generate` would make for `prompt` (1, n), which is `more` tokens longer than the given one's prompt.

    `max_length`: of the text. `counts_new`: the minimum length was given in new tokens.
    """
    out, kind = copy.copy(processor), type(processor).__name__
    if kind == "StructuredOutput":
        return processor.at(processor.begin + more)
    if kind in COUNTED:
        setattr(out, COUNTED[kind], getattr(out, COUNTED[kind]) + more)
    elif kind == "MinLengthLogitsProcessor" and counts_new:
        out.min_length += more
    elif kind == "ForcedEOSTokenLogitsProcessor":
        out.max_length = max_length
    elif kind == "EncoderRepetitionPenaltyLogitsProcessor":
        out.encoder_input_ids = prompt
    elif kind == "EncoderNoRepeatNGramLogitsProcessor":
        out = type(processor)(out.ngram_size, prompt)
    elif kind == "RepetitionPenaltyLogitsProcessor":
        out.prompt_ignore_length = (
            None  # masks padding, which a single row lacks: one processor serves any number of rows
        )
    return out


def merged(defaults: Sequence[Any], callers: Sequence[Any]) -> list[Any]:
    """Merge the caller's processors or criteria into Transformers', as `generate` does: a caller's replaces one of the same type."""
    kinds = {type(each): each for each in reversed(callers)}
    behind = next((n for n, each in enumerate(defaults) if type(each).__name__ in LAST), len(defaults))
    out = {id(each): each for each in (kinds.get(type(each), each) for each in defaults[:behind])}
    return [*(out | {id(each): each for each in callers}).values(), *defaults[behind:]]


class RowProcessing(Processing):
    """The processors of a call's rows: a row has either the call's list or a separate one."""

    def __init__(self, first: Processing, places: int):
        """`first`: the processing of a row with the call's list. `places`: the call's maximum of rows."""
        super().__init__(first.processors, places)
        self.members = [first] * places

    def insert(self, number: int, member: Processing) -> None:
        """Give row `number` the processors of `member`, which has one row."""
        self.members[number] = member
        self.apart |= member.apart or member.processors is not self.processors
        self.needs_prefix |= member.needs_prefix
        self.runs_callers_code |= member.runs_callers_code
        self.may_forbid |= member.may_forbid

    def blame(self, ids: torch.Tensor, length: int, scores: torch.Tensor, row: int) -> str | None:
        return self.members[row].blame(ids, length, scores, 0)

    def commit(self, row: int, count: int) -> None:
        self.members[row].commit(0, count)

    def functions(self) -> "RowProcessing":
        out = copy.copy(self)
        out.members, out.processors = [member.functions() for member in self.members], super().functions().processors
        return out

    def __call__(
        self,
        ids: torch.Tensor,
        lengths: Sequence[int],
        scores: torch.Tensor,
        row_ids: Sequence[int],
        active_positions: Sequence[int] | None = None,
    ) -> torch.Tensor:
        if not self.apart:
            return super().__call__(ids, lengths, scores, row_ids, active_positions)
        rows = [
            self.members[number](
                ids[b : b + 1],
                lengths[b : b + 1],
                scores[b : b + 1],
                [0],
                None if active_positions is None else active_positions[b : b + 1],
            )
            for b, number in enumerate(row_ids)
        ]
        return torch.cat(rows)
