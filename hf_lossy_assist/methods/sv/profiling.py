"""Make SV's profile: how often the target accepts a drafted token of given S and A, and what a round costs on this machine.

Kim et al., "Speculative Verification" (huggingface.co/papers/2509.24328), §4.2, §5 and Appendix A.2. Samples and seconds are both
taken from strict decoding with the real engine: the samples with the companion looking on, the seconds with lengths drawn at random.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from huggingface_hub.utils import tqdm

from ...artifacts.files import new_folder
from ...artifacts.machine import machine
from ...artifacts.profile import MODELS, Profile
from ...artifacts.profile_tables import Bins, Latency
from ...engine.call import Call
from ...filters.base import VerifyFilter
from ...filters.companion import check_companion
from ...filters.scheduling import choose
from ...filters.sv import acceptance, probs_of, similarity
from ...generation.runner import Runner
from ...models.identity import ModelIdentity, tokenizer_hash, versions, weights_hash
from ...models.trials import why_not_rows
from ...policy.policy import LossyPolicy
from ...round import Draft, Selection, Verified
from ...rules.accepting import Randomness
from ...stops.basic import Constant
from ...training.jobs import clear, folders, key_of, prepare, read_part, write_part
from .cells import Samples, build, cells, entropies
from .instrument import InstrumentedRunner, ProfileSettings, run
from .plots import cells_figure, goodput_figure
from .round_costs import measure


DEFAULTS = ProfileSettings()
SHAPES = (("5 × 5", 5, 5, False), ("10 × 10", 10, 10, False), ("20 × 20", 20, 20, False), ("adaptive", 16, 17, True))
STARTED = "started.json"  # in the unfinished profile: what it is of
FEWEST = 1000  # samples: about four for each cell of the finest table
HELD_OUT = 0.2  # of the prompts, for every figure in the report


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

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: Randomness) -> Selection:
        return Selection(draft, draft.lengths, companion=companion)


def profile(
    target: Any, draft: Any, companion: Any, tokenizer: Any, texts: Sequence[str], out: str | Path,
    settings: ProfileSettings = DEFAULTS, *, resume: bool = False, source: str = "",
) -> Profile:  # fmt: skip
    """Make a profile and write it into the folder `out`, all or nothing.

    Finished batches of samples are files in `out`.partial at once; seconds are taken in one go, after them.

    Args:
        target, draft, companion: loaded decoder-only models with one tokenizer.
        texts: prompts, not those that speed will be measured on.
        resume: go on with an unfinished profile of the same models, prompts and settings.
        source: where they come from, for the record.

    Raises: `ValueError`, one line, for models that cannot be used and for too few samples.
    """
    out, part = folders(out)
    if out.exists():
        raise ValueError(f"{out} exists: choose another --out, or delete it to profile again")
    if len(texts) < 2:
        raise ValueError(f"at least 2 prompts are needed, for some are held out; got {len(texts)}: pass more prompts")
    for name, model in (("target", target), ("draft", draft)):
        reason = why_not_rows(model)
        if reason is not None:
            raise ValueError(f"profiling needs models that run in batches; the {name} does not: {reason}")
    Runner(LossyPolicy(filter=ObserveOnlyFilter(companion)), draft).validate(target)
    prepare(out, part, facts(target, draft, companion, tokenizer, texts, settings), resume, STARTED)
    samples = collect(target, draft, companion, tokenizer, texts, settings, part)
    if len(samples.x) < FEWEST:
        clear(part, STARTED)
        raise ValueError(
            f"{len(texts)} prompts gave {len(samples.x)} drafted tokens; at least {FEWEST} are needed: pass more prompts"
        )
    fitted, kept, metrics = report(samples, settings.seed)
    bins, gamma = build(fitted, *SHAPES[-1][1:]), settings.gamma[-1]
    latency = measure(target, draft, companion, tokenizer, texts, settings, bins)
    made = Profile(
        bins=bins,
        latency=latency,
        gamma=gamma,
        pays=np.array([predicted(bins, latency, kept, int(b), gamma, settings.seed) for b in latency.batches]),
        target=ModelIdentity.of(target),
        draft=ModelIdentity.of(draft),
        companion=ModelIdentity.of(companion),
        tokenizer_hash=tokenizer_hash(tokenizer),
        decoding=settings.decoding(),
        machine=machine(target.device),
        training={"prompts": len(texts), "source": source, "settings": settings.to_dict()},
        metrics=metrics,
        versions=versions(),
    )
    largest = int(latency.batches[-1])
    with new_folder(out) as folder:
        made.write(folder)
        cells_figure(bins, folder / "cells.png")
        goodput_figure(next(expected(bins, kept, largest, gamma, settings.seed))[0], latency, folder / "goodput.png")
    clear(part, STARTED)
    return made


def facts(
    target: Any, draft: Any, companion: Any, tokenizer: Any, texts: Sequence[str], settings: ProfileSettings
) -> dict[str, Any]:
    """What decides every sample: a resumed profile must have the same."""
    return settings.to_dict() | {
        "target": ModelIdentity.of(target).to_dict(),
        "draft": ModelIdentity.of(draft).to_dict(),
        "companion": ModelIdentity.of(companion).to_dict(),
        **{
            f"{name}_weights": weights_hash(model)
            for name, model in zip(MODELS, (target, draft, companion), strict=True)
        },
        "dtypes": [str(model.dtype) for model in (target, draft, companion)],
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "prompts_sha256": hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest(),
    }


def report(samples: Samples, seed: int) -> tuple[Samples, Samples, dict[str, Any]]:
    """Samples to build cells from, those of held-out prompts, and what the latter say of S and A."""
    numbers = np.unique(samples.text)
    held_out = np.random.default_rng(seed).permutation(numbers)[: max(1, round(HELD_OUT * len(numbers)))]
    held = np.isin(samples.text, held_out)
    fitted, kept = samples.of(~held), samples.of(held)
    metrics = {
        "samples": len(samples.x),
        "held_out": len(kept.x),
        "acceptance": float(np.average(samples.x, weights=samples.reached)),
        "information": entropies(fitted, kept, SHAPES),
        "correlation": correlation(kept.s, kept.similarity),
    }
    return fitted, kept, metrics


def collect(
    target: Any, draft: Any, companion: Any, tokenizer: Any, texts: Sequence[str], settings: ProfileSettings,
    kept: Path | None = None,
) -> Samples:  # fmt: skip
    """Strict decoding of every prompt at each γ, watched by the companion.

    A finished batch of prompts is a file in `kept`, and one that is there already is not run again.
    """
    parts: list[dict[str, np.ndarray]] = []
    rounds, key = 0, "" if kept is None else key_of(kept / STARTED)
    for longest in settings.gamma:
        for first in tqdm(range(0, len(texts), settings.batch_size), desc=f"γ = {longest}", unit="batch"):
            file = None if kept is None else kept / f"{longest}-{first:06d}.safetensors"
            data = None if file is None else read_part(file, key)
            if data is None:
                chosen = texts[first : first + settings.batch_size]
                one = sample(target, draft, companion, tokenizer, chosen, settings, longest, first)
                if file is not None:
                    write_part(file, safetensors.numpy.save(one), key)
            else:
                one = safetensors.numpy.load(data)
            one["round"] = one["round"] + rounds
            rounds = int(one["round"].max(initial=rounds - 1)) + 1
            parts.append(one)
    return Samples(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def sample(
    target: Any, draft: Any, companion: Any, tokenizer: Any, texts: Sequence[str], settings: ProfileSettings,
    longest: int, first: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The columns of `Samples` for one batch of prompts, the first of which is number `first`; its rounds count from 0."""
    parts: list[dict[str, np.ndarray]] = []
    rounds = 0

    def watch(call: Call, verified: Verified) -> None:
        nonlocal rounds
        draft, companion_probs = verified.draft, verified.selection.companion
        batch, gamma = draft.tokens.shape
        if gamma == 0:
            return
        assert companion_probs is not None, "the filter always reads it"
        p, q = verified.p[:, :gamma], probs_of(draft)
        if verified.sampling:
            x = (draft.probs_of_tokens(p) / draft.probs_of_tokens(q)).clamp(max=1.0)
        else:
            x = (draft.tokens == verified.argmax[:, :gamma]).float()
        x = x.double()
        reached = torch.cat([torch.ones_like(x[:, :1]), x[:, :-1].cumprod(dim=1)], dim=1)
        place = torch.arange(gamma).expand(batch, -1)
        text = torch.tensor([first + row for row in call.rows.index])[:, None].expand(-1, gamma)
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


def expected(bins: Bins, samples: Samples, batch: int, gamma: int, seed: int) -> Iterator[np.ndarray]:
    """Rounds of γ in random batches, without end: what P̂ says of each drafted token and what was true, (2, B, γ)."""
    random, samples = np.random.default_rng(seed), samples.of(samples.gamma == gamma)
    number, inverse = np.unique(samples.round, return_inverse=True)
    table = np.zeros((2, len(number), gamma))
    s, a = cells(bins.s_edges, bins.a_edges, samples)
    table[0, inverse, samples.place] = bins.accept[s, a]
    table[1, inverse, samples.place] = samples.x
    while True:
        yield table[:, random.choice(len(number), batch)]


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's; None where one of them never changes."""
    return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) > 0 and np.ptp(y) > 0 else None


def predicted(bins: Bins, latency: Latency, samples: Samples, batch: int, gamma: int, seed: int) -> float:
    """The speed of SV against strict acceptance, by replaying held-out rounds in random batches with the measured seconds."""
    seconds, alone = latency.of(batch, gamma), latency.unobserved(batch, gamma)
    total = np.zeros(4)  # tokens and seconds of SV, of strict
    for accept, true in islice(expected(bins, samples, batch, gamma, seed), 200):
        kept = choose(accept, seconds, float(batch)).kept
        gain = np.cumprod(true, axis=1)
        sent = np.arange(gamma) < kept[:, None]
        total += (batch + gain[sent].sum(), seconds[kept.sum()], batch + gain.sum(), alone)
    return float(total[0] / total[1] / (total[2] / total[3]))
