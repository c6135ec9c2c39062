"""Rounds of the real engine on some prompts, watched: what a profile's samples and seconds are taken from."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from ...artifacts.conditions import check_sampling, select_sampling
from ...artifacts.sv_profile import LONGEST_PROFILED
from ...engine.call import Call
from ...engine.loop import decode
from ...generation.runner import Runner
from ...policy.policy import LossyPolicy
from ...round import Verified
from ...stats.speculation import SpeculationStats
from ...validation import MOST_NEW_TOKENS, MOST_ROWS, check_int, shown


@dataclass(frozen=True)
class ProfileSettings:
    """What decides a profile. The paper: 512 prompts, γ of 5 and 7, the models' own sampling settings."""

    gamma: tuple[int, ...] = (5, 7)
    new_tokens: int = 64  # of each prompt
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    batch_size: int = 16  # while samples are taken
    batches: tuple[int, ...] = (1, 4, 16, 32, 64)  # whose rounds are timed
    rounds: int = 8  # timed of each kind: `LEVELS` numbers of verified tokens, with and without the companion
    seed: int = 0

    def __post_init__(self) -> None:
        for name, high in (("gamma", LONGEST_PROFILED), ("batches", MOST_ROWS)):
            given = getattr(self, name)
            if not isinstance(given, list | tuple):
                raise TypeError(f"{name}: expected numbers such as (5, 7), got {shown(given)}")
            if not given:
                raise ValueError(f"{name}: expected at least one number")
            for value in given:
                check_int(name, value, 1, high)
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        check_int("batch_size", self.batch_size, 1, MOST_ROWS)
        least = 2 * self.gamma[-1] + 2  # two rounds, the second of which is timed
        check_int("new_tokens", self.new_tokens, least, MOST_NEW_TOKENS)
        check_int("rounds", self.rounds, 3, 10**6)
        check_int("seed", self.seed, 0)
        check_sampling(self)

    def decoding(self) -> dict[str, Any]:
        """The settings of the distributions, as `generate` names them."""
        return select_sampling(asdict(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in the types of JSON."""
        return asdict(self) | {"gamma": list(self.gamma), "batches": list(self.batches)}


class InstrumentedRunner(Runner):
    """A policy and a draft whose every round is shown to `watch(call, verified)`, after it."""

    reads_wholly = True

    def __init__(self, policy: LossyPolicy, draft: Any, watch: Callable[[Call, Verified], None]):
        super().__init__(policy, draft)
        self.watch = watch

    def decode(self, call: Call) -> SpeculationStats:
        call.on_round = lambda verified, verdict: self.watch(call, verified)
        return decode(call)


def run(
    target: Any,
    tokenizer: Any,
    texts: Sequence[str],
    walk: Runner | None,
    settings: ProfileSettings,
    endless: bool = False,
) -> int:
    """Continue `texts` in one batch, by the target alone where `walk` is None; `endless`: end tokens do not end them.

    Returns: how many tokens were written, each row up to its end.
    """
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    config = GenerationConfig(
        max_new_tokens=settings.new_tokens, pad_token_id=pad,
        eos_token_id=None if endless else target.generation_config.eos_token_id, **settings.decoding(),
    )  # fmt: skip
    out = type(target).generate(target, ids, attention_mask=mask, generation_config=config, custom_generate=walk)
    sequences = out if isinstance(out, torch.Tensor) else out.sequences
    ends = target.generation_config.eos_token_id
    return written(sequences[:, width:].tolist(), ends if isinstance(ends, list) else [ends])


def written(rows: Sequence[Sequence[int]], ends: Sequence[int | None]) -> int:
    """Tokens of all rows, each up to its first end token."""
    return sum(next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in rows)
