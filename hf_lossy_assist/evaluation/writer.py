"""Continue a batch of prompts with one arm: texts, seconds, and statistics of the call."""

import time
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..generation.speculative import stop_at
from ..models.compiled.compilation import graphs_made
from ..models.introspection import device_of, end_tokens
from ..stats.clock import wait_for
from ..tasks.base import AnswerTask
from ..text.detokenizer import continuation, special_in
from ..training.jobs import SamplingSettings
from .arms import COMPILED, Arm


COUNTS = ("num_draft_tokens", "num_accepted_draft_tokens", "num_lossy_accepts", "num_unchecked_tokens")
REPEATS = 4  # of a compiled arm's batch: a longer text needs another graph, a row that ends one more
TAIL = 192  # tokens that include those of a round and of the sentence that ends a text


@dataclass(frozen=True, kw_only=True)
class DecodingSettings(SamplingSettings):
    """Decoding settings of all arms."""

    max_new_tokens: int = 128


@dataclass
class ArmOutput:
    """Text of one arm for one prompt, and the seconds of its batch.

    Args:
        prompt: index among the prompts.
        unit: number of its batch among those of this size; `seconds` are the batch's.
        first_token: seconds until the first new token; None in batches.
        target_calls: of the row's rounds; None if they were not counted.
        accept_lengths: tokens of each round including the target's, as in Spec-Bench.
        right: whether the task judges the answer to be right; None if unknown.
    """

    arm: str
    prompt: int
    batch_size: int
    unit: int
    text: str
    token_ids: list[int]
    seconds: float
    first_token: float | None = None
    target_calls: int | None = None
    accept_lengths: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_lossy_accepts: int = 0
    num_unchecked_tokens: int = 0
    right: bool | None = None


class FirstToken(BaseStreamer):
    """Records when the first new token came. The first `put` passes the prompt."""

    keeps_no_tensors = True
    puts = 0
    at: float | None = None  # seconds of `time.perf_counter`

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Do nothing: the end of the text is not timed."""


class EndsAnywhere(StoppingCriteria):
    """Stop string criterion for texts that grow by several tokens at once: a text ends wherever in them the string occurs.

    Transformers' assisted generation checks only after a round. Otherwise it would write on, and be timed, to the end of the text. Only the last
    `TAIL` tokens are searched; earlier ones have been.
    """

    judges_rows_alone = True

    def __init__(self, writer: "TextWriter", width: int):
        """`width`: of the prompt, which is not part of the text."""
        self.writer, self.width = writer, width

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        begin = max(self.width, input_ids.shape[1] - TAIL)
        rows = zip(input_ids[:, :begin].tolist(), input_ids[:, begin:].tolist(), strict=True)
        ended = [self.writer.holds_end(before, tail) for before, tail in rows]
        return torch.tensor(ended, device=input_ids.device)


@dataclass(frozen=True)
class TextWriter:
    """The models' side of a comparison, which turns prompts into answers."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    decoding: DecodingSettings
    task: AnswerTask | None = None  # its texts may end before an end token, as with few-shot prompts

    @cached_property
    def _visible(self) -> dict[int, str]:
        """Special tokens at which the task says that a text has ended."""
        return {} if self.task is None else special_in(self.tokenizer, self.task.ends)

    def write(self, arm: Arm, prompts: list[str], first: int, unit: int) -> list[ArmOutput]:
        """Continue a batch of prompts, the first of which has index `first`; again if it waited for the compiler."""
        groups = [[prompt] for prompt in prompts] if arm.kind == "assisted" else [prompts]
        compiled = arm.name.endswith(COMPILED)
        for _ in range(REPEATS if compiled else 1):
            before = graphs_made() if compiled else 0
            written = [self._group(arm, group, unit) for group in groups]
            if compiled and graphs_made() == before:
                break
        seconds = sum(group[0].seconds for group in written)
        answers = [answer for group in written for answer in group]
        for index, answer in enumerate(answers, first):
            answer.prompt, answer.batch_size, answer.seconds = index, len(prompts), seconds
        return answers

    def _group(self, arm: Arm, prompts: list[str], unit: int) -> list[ArmOutput]:
        """Continue prompts in one call."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to(device_of(self.target))
        inputs.pop("token_type_ids", None)
        streamer = FirstToken()
        settings = self.decoding.decoding() | {"max_new_tokens": self.decoding.max_new_tokens}
        if len(prompts) == 1:
            settings["streamer"] = streamer
        if self.task is not None and self.task.ends_early:
            # A criterion, since Transformers' assisted generation passes `stop_strings` to the draft without the tokenizer.
            settings["stopping_criteria"] = StoppingCriteriaList([self._criterion(arm, inputs["input_ids"].shape[1])])
        torch.manual_seed(self.decoding.seed + unit)
        assert arm.write is not None
        wait_for(device_of(self.target))
        began = time.perf_counter()
        out = arm.write(**inputs, **settings, return_dict_in_generate=True)
        wait_for(device_of(self.target))
        seconds = time.perf_counter() - began
        stats, ends = getattr(out, "speculation", None), end_tokens(self.target.generation_config)
        answers = []
        for i, row in enumerate(out.sequences[:, inputs["input_ids"].shape[1] :].tolist()):
            prompt = inputs["input_ids"][i][inputs["attention_mask"][i].bool()].tolist()
            stats_row = None if stats is None else stats.rows[i]
            length = next((j + 1 for j, token in enumerate(row) if token in ends), len(row))
            ids = self._ended(prompt, row[: length if stats_row is None else stats_row.num_new_tokens])
            text = continuation(self.tokenizer, prompt, ids)
            answer = ArmOutput(arm.name, i, len(prompts), unit, text, ids, seconds)
            answer.first_token = streamer.at and streamer.at - began
            if stats_row is not None:
                steps = sorted(stats_row.steps.items())
                answer.accept_lengths = [accepted + 1 for (_, accepted), times in steps for _ in range(times)]
                answer.target_calls = stats_row.num_spec_steps
                for name in COUNTS:
                    setattr(answer, name, getattr(stats_row, name))
            elif arm.kind == "target":
                answer.target_calls = len(ids)
            answers.append(answer)
        return answers

    def _criterion(self, arm: Arm, width: int) -> StoppingCriteria:
        """Return the criterion that ends a text of `arm` where its task says so, after prompts of `width` tokens."""
        assert self.task is not None
        if arm.kind == "assisted" or self.task.closing is not None:
            return EndsAnywhere(self, width)
        return stop_at(list(self.task.ends), self.tokenizer)

    def holds_end(self, before: list[int], ids: list[int]) -> bool:
        """Return whether, according to the task, the text of `ids` after `before` has ended."""
        if self.task is None or not self.task.ends_early:
            return False
        return self.task.over(continuation(self.tokenizer, before, ids, self._visible))

    def _ended(self, prompt: list[int], ids: list[int]) -> list[int]:
        """Return `ids` up to the token that ended the text, since rounds of Transformers' assisted generation and padding go beyond it."""
        if not self.holds_end(prompt, ids):
            return ids
        return ids[: bisect_left(range(len(ids)), True, lo=1, key=lambda count: self.holds_end(prompt, ids[:count]))]
