"""Run and observe rounds of the real engine on prompts; a profile's samples and seconds come from these."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...artifacts.sv_profile import LONGEST_PROFILED
from ...drafters.hidden_state import DraftModel
from ...engine.call import Call
from ...engine.loop import decode
from ...filters.base import CompanionFilter
from ...generation.runner import Runner
from ...policy.policy import LossyPolicy
from ...round import Draft, Selection, Verified
from ...rules.acceptance import RandomSource
from ...stats.speculation import SpeculationStats
from ...training.jobs import SamplingSettings, continue_prompts
from ...validation import MOST_NEW_TOKENS, MOST_ROWS, check_int, shown


@dataclass(frozen=True)
class ProfileSettings(SamplingSettings):
    """Settings that determine a profile. The paper: 512 prompts, γ of 5 and 7, the models' sampling settings."""

    gamma: tuple[int, ...] = (5, 7)
    new_tokens: int = 64  # of each prompt
    batch_size: int = 16  # while samples are collected
    batches: tuple[int, ...] = (1, 4, 16, 32, 64)  # sizes at which rounds are timed
    rounds: int = 8  # timed of each kind: `LEVELS` numbers of verified tokens, with and without the companion
    do_sample: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, high in (("gamma", LONGEST_PROFILED), ("batches", MOST_ROWS)):
            setting = getattr(self, name)
            if not isinstance(setting, list | tuple):
                raise TypeError(f"{name}: expected numbers such as (5, 7), got {shown(setting)}")
            if not setting:
                raise ValueError(f"{name}: expected at least one number")
            for value in setting:
                check_int(name, value, 1, high)
            object.__setattr__(self, name, tuple(sorted(set(setting))))
        check_int("batch_size", self.batch_size, 1, MOST_ROWS)
        least = 2 * self.gamma[-1] + 2  # two rounds, the second of which is timed
        check_int("new_tokens", self.new_tokens, least, MOST_NEW_TOKENS)
        check_int("rounds", self.rounds, 3, 10**6)

    def to_dict(self) -> dict[str, object]:
        """Return the settings in JSON types."""
        return asdict(self) | {"gamma": list(self.gamma), "batches": list(self.batches)}


class InstrumentedRunner(Runner):
    """A policy and a draft that call `watch(call, verified)` after every round."""

    def __init__(self, policy: LossyPolicy, draft: DraftModel, watch: Callable[[Call, Verified], None]):
        super().__init__(policy, draft)
        self.watch = watch

    def decode(self, call: Call) -> SpeculationStats:
        call.on_round = lambda verified, verdict: self.watch(call, verified)
        return decode(call)


@dataclass(frozen=True, eq=False)
class ObserveOnlyFilter(CompanionFilter):
    """A filter that verifies everything while a companion reads along."""

    companion: PreTrainedModel

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        return Selection(draft, draft.lengths, companion=companion)


def run(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    runner: Runner | None,
    settings: ProfileSettings,
    ends: bool = True,
) -> int:
    """Continue `texts` in one batch, with the target alone if `runner` is None; return the number of tokens written.

    `ends`: end tokens end the rows; tokens after a row's first one are not counted.
    """
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    rows = continue_prompts(target, tokenizer, prompts, settings.new_tokens, settings.decoding(), runner, ends)
    return sum(map(len, rows))
