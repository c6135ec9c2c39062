"""Observe rounds of the real engine on prompts while the companion reads along; a profile's samples and seconds come from these."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
import safetensors.numpy
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...artifacts.sv_profile import LONGEST_PROFILED
from ...drafters.hidden_state import DraftModel
from ...engine.call import Call
from ...engine.loop import decode
from ...filters.base import CompanionFilter
from ...filters.sv import acceptance, probs_of, similarity
from ...generation.runner import Runner
from ...policy.policy import LossyPolicy
from ...round import Draft, Selection, Verified
from ...rules.acceptance import RandomSource
from ...setting_fields import check_bounds
from ...stats.speculation import SpeculationStats
from ...stops.constant import Constant
from ...training.jobs import SamplingSettings, continue_prompts
from ...training.run_folder import RunFolder, Tell
from ...validation import MOST_NEW_TOKENS, MOST_ROWS, check_int
from .acceptance_table import Samples


STARTED = "started.json"  # the record in an unfinished profile


@dataclass(frozen=True)
class ProfileSettings(SamplingSettings):
    """Settings that determine a profile. The paper: 512 prompts, γ of 5 and 7, the models' sampling settings."""

    gamma: tuple[int, ...] = (5, 7)
    new_tokens: Annotated[int, (4, MOST_NEW_TOKENS), "new tokens of each prompt"] = 64
    batch_size: Annotated[int, (1, MOST_ROWS), "prompts at a time while samples are collected"] = 16
    batches: tuple[int, ...] = (1, 4, 16, 32, 64)  # sizes at which rounds are timed
    # Of each kind: `LEVELS` counts of verified tokens, with and without the companion.
    rounds: Annotated[int, (3, 10**6), "rounds timed for each number of verified tokens"] = 8
    do_sample: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self)
        for name, high in (("gamma", LONGEST_PROFILED), ("batches", MOST_ROWS)):
            for value in getattr(self, name):
                check_int(name, value, 1, high)
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
            if not getattr(self, name):
                raise ValueError(f"{name}: expected at least one number")
        # Two rounds, the second of which is timed.
        check_int("new_tokens", self.new_tokens, 2 * self.gamma[-1] + 2, MOST_NEW_TOKENS)

    def to_dict(self) -> dict[str, object]:
        """Return the settings in JSON types."""
        return asdict(self) | {"gamma": list(self.gamma), "batches": list(self.batches)}


@dataclass(frozen=True, eq=False)
class ObserveOnlyFilter(CompanionFilter):
    """A filter that verifies everything while a companion reads along."""

    companion: PreTrainedModel

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        return Selection(draft, draft.lengths, companion=companion)


class InstrumentedRunner(Runner):
    """A policy and a draft that call `watch(call, verified)` after every round."""

    def __init__(self, policy: LossyPolicy, draft: DraftModel, watch: Callable[[Call, Verified], None]):
        super().__init__(policy, draft)
        self.watch = watch

    def decode(self, call: Call) -> SpeculationStats:
        call.on_round = lambda verified, verdict: self.watch(call, verified)
        return decode(call)


class Profiled(NamedTuple):
    """Models with one tokenizer, prompts and settings of a profile."""

    target: PreTrainedModel
    draft: DraftModel
    companion: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    texts: Sequence[str]
    settings: ProfileSettings

    def run(
        self, texts: Sequence[str], policy: LossyPolicy, watch: Callable[[Call, Verified], None], ends: bool = True
    ) -> None:
        """Continue `texts` in one batch, and call `watch` after every round. `ends`: end tokens end the rows."""
        prompts, runner = (
            [self.tokenizer(text)["input_ids"] for text in texts],
            InstrumentedRunner(policy, self.draft, watch),
        )
        settings = self.settings
        continue_prompts(self.target, self.tokenizer, prompts, settings.new_tokens, settings.decoding(), runner, ends)


def collect(profiled: Profiled, run_folder: RunFolder) -> Samples:
    """Decode every prompt strictly at each γ with the companion reading along.

    Each batch of prompts is a file, and existing ones are not run again. Several processes share the batches, and all return all samples.
    """
    settings = profiled.settings
    batches = [(gamma, n) for gamma in settings.gamma for n in range(0, len(profiled.texts), settings.batch_size)]
    names = [f"{gamma}-{first:06d}.safetensors" for gamma, first in batches]

    def make(_: object, index: int, tell: Tell) -> bytes:
        gamma, first = batches[index]
        torch.manual_seed(settings.seed * 1_000_003 + first)
        return safetensors.numpy.save(sample(profiled, gamma, first, tell))

    run_folder.write_units(names, make, (profiled.target, profiled.draft, profiled.tokenizer), settings.seed)
    pieces, rounds = list[dict[str, np.ndarray]](), 0
    for name in names:
        one = safetensors.numpy.load((run_folder.part / name).read_bytes())
        one["round"] = one["round"] + rounds
        rounds = int(one["round"].max(initial=rounds - 1)) + 1
        pieces.append(one)
    return Samples(**{name: np.concatenate([one[name] for one in pieces]) for name in pieces[0]})


def sample(profiled: Profiled, longest: int, first: int, tell: Tell) -> dict[str, np.ndarray]:
    """Return the columns of `Samples` for the batch of prompts that begins with `first`; rounds are numbered from 0."""
    settings, pieces, rounds = profiled.settings, list[dict[str, np.ndarray]](), 0

    def watch(call: Call, verified: Verified) -> None:
        nonlocal rounds
        tell(min((max(call.rows.lengths) - call.rows.width) / settings.new_tokens, 1.0))
        draft, companion_probs = verified.draft, verified.selection.companion
        batch, gamma = draft.tokens.shape
        if gamma == 0:
            return
        assert companion_probs is not None, "the filter always reads it"
        p, q = verified.p[:, :gamma], probs_of(draft)
        if verified.sampling:
            x = (draft.at_tokens(p) / draft.at_tokens(q)).clamp(max=1.0)
        else:
            x = (draft.tokens == verified.argmax[:, :gamma]).float()
        x = x.double()
        slot = torch.arange(gamma).expand(batch, -1)
        text = torch.tensor([first + row for row in call.rows.row_id_list])[:, None].expand(-1, gamma)
        round_ids = torch.arange(rounds, rounds + batch)[:, None].expand(-1, gamma)
        rounds += batch
        inside = (slot < draft.lengths.cpu()[:, None]).numpy()
        values = {
            "s": similarity(draft, companion_probs),
            "a": acceptance(draft, companion_probs),
            "x": x,
            "similarity": torch.minimum(p, q).sum(dim=-1),
            "slot": slot,
            "gamma": torch.full((batch, gamma), call.stop.settings.longest),
            "text": text,
            "round": round_ids,
            "reached": torch.cat([torch.ones_like(x[:, :1]), x[:, :-1].cumprod(dim=1)], dim=1),
        }
        pieces.append({name: value.cpu().numpy()[inside] for name, value in values.items()})

    policy = LossyPolicy(stop=Constant(longest), filter=ObserveOnlyFilter(profiled.companion))
    profiled.run(profiled.texts[first : first + settings.batch_size], policy, watch)
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
