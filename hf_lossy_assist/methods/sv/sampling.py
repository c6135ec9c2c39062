"""Samples for a profile: strict decoding of prompts with the real engine while the companion reads along."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from ...engine.call import Call
from ...filters.base import VerifyFilter
from ...filters.companion import check_companion
from ...filters.sv import acceptance, probs_of, similarity
from ...policy.policy import LossyPolicy
from ...round import Draft, Selection, Verified
from ...rules.acceptance import RandomSource
from ...stops.constant import Constant
from ...terminal import Bar
from ...training.processes import ALONE, Processes
from ...training.resumable import compute_key, read_part, write_part
from .cells import Samples
from .instrument import InstrumentedRunner, ProfileSettings, run


STARTED = "started.json"  # in the unfinished profile: what it is of


@dataclass(frozen=True, eq=False)
class ObserveOnlyFilter(VerifyFilter):
    """Verifies everything, while a companion reads along."""

    companion: Any

    def companion_for(self, target: Any) -> Any:
        return self.companion

    def check(self, target: Any, draft: Any, tokenizer: Any = None, longest: int = 0) -> None:
        check_companion(draft, self.companion)

    def reads_companion(self, rows: int) -> bool:
        return True

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        return Selection(draft, draft.lengths, companion=companion)


def collect(
    target: Any, draft: Any, companion: Any, tokenizer: Any, texts: Sequence[str], settings: ProfileSettings,
    kept: Path | None = None, processes: Processes = ALONE,
) -> Samples:  # fmt: skip
    """Strict decoding of every prompt at each γ, watched by the companion.

    A finished batch of prompts is a file in `kept`, and one that is there already is not run again. Each of several processes samples
    its share of the batches, and all return all samples.
    """
    own: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    key = "" if kept is None else compute_key(kept / STARTED)
    for longest in settings.gamma:
        firsts = processes.share(range(0, len(texts), settings.batch_size))
        with Bar(len(firsts), f"γ = {longest}", "batches", quiet=not processes.first) as bar:
            for done, first in enumerate(firsts):
                file = None if kept is None else kept / f"{longest}-{first:06d}.safetensors"
                data = None if file is None else read_part(file, key)
                if data is None:
                    chosen = texts[first : first + settings.batch_size]
                    tell = partial(_tell, bar, done, settings.new_tokens)
                    one = sample(target, draft, companion, tokenizer, chosen, settings, longest, first, tell)
                    if file is not None:
                        write_part(file, safetensors.numpy.save(one), key)
                else:
                    one = safetensors.numpy.load(data)
                    bar.skip(1)
                own[longest, first] = one
                bar.to(done + 1)
    found = {place: one for its in processes.all(own) for place, one in its.items()}
    parts, rounds = [], 0
    for longest in settings.gamma:
        for first in range(0, len(texts), settings.batch_size):
            one = found[longest, first]
            one["round"] = one["round"] + rounds
            rounds = int(one["round"].max(initial=rounds - 1)) + 1
            parts.append(one)
    return Samples(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _tell(bar: Bar, done: int, new_tokens: int, tokens: int) -> None:
    bar.to(done + min(tokens / new_tokens, 1.0))


def sample(
    target: Any, draft: Any, companion: Any, tokenizer: Any, texts: Sequence[str], settings: ProfileSettings,
    longest: int, first: int, tell: Callable[[int], None] = lambda tokens: None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The columns of `Samples` for one batch of prompts, the first of which is number `first`; its rounds count from 0.

    `tell`: is given the new tokens of the longest row.
    """
    parts: list[dict[str, np.ndarray]] = []
    rounds = 0

    def watch(call: Call, verified: Verified) -> None:
        nonlocal rounds
        tell(max(call.rows.lengths) - call.rows.width)
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
        reached = torch.cat([torch.ones_like(x[:, :1]), x[:, :-1].cumprod(dim=1)], dim=1)
        place = torch.arange(gamma).expand(batch, -1)
        text = torch.tensor([first + row for row in call.rows.row_id_list])[:, None].expand(-1, gamma)
        number = torch.arange(rounds, rounds + batch)[:, None].expand(-1, gamma)
        most = torch.full((batch, gamma), call.stop.settings.longest)
        rounds += batch
        inside = (place < draft.lengths.cpu()[:, None]).numpy()
        values = {
            "s": similarity(draft, companion_probs), "a": acceptance(draft, companion_probs), "x": x,
            "similarity": torch.minimum(p, q).sum(dim=-1), "place": place,
            "gamma": most, "text": text, "round": number, "reached": reached,
        }  # fmt: skip
        parts.append({name: value.cpu().numpy()[inside] for name, value in values.items()})

    policy = LossyPolicy(stop=Constant(longest), filter=ObserveOnlyFilter(companion))
    with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(settings.seed * 1_000_003 + first)
        run(target, tokenizer, texts, InstrumentedRunner(policy, draft, watch), settings)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
