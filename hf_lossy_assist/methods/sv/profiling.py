"""Make SV's profile: how often the target accepts a drafted token of given S and A, and what a round costs on this machine.

Kim et al., "Speculative Verification" (huggingface.co/papers/2509.24328), §4.2, §5 and Appendix A.2. Samples and seconds are both
taken from strict decoding with the real engine: the samples with the companion looking on, the seconds with lengths drawn at random.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...artifacts.conditions import describe_machine
from ...artifacts.files import check_new, new_folder
from ...artifacts.sv_profile import MODELS, Profile
from ...drafters.hidden_state import refuse_models
from ...generation.runner import Runner
from ...models.identity import ModelIdentity, tokenizer_hash, versions, weights_hash
from ...policy.policy import LossyPolicy
from ...training.processes import Processes
from ...training.resumable import clear, folders, start_run
from .alternatives import ALTERNATIVES
from .alternatives import measure as measure_alternatives
from .cells import build
from .held_out import SHAPES, expected, predicted, report
from .instrument import ProfileSettings
from .plots import cells_figure, goodput_figure
from .round_costs import measure
from .sampling import STARTED, ObserveOnlyFilter, collect


DEFAULTS = ProfileSettings()
FEWEST = 1000  # samples: about four for each cell of the finest table


def profile(
    target: Any, draft: Any, companion: Any, tokenizer: Any, texts: Sequence[str], out: str | Path,
    settings: ProfileSettings = DEFAULTS, *, resume: bool = False, source: str = "",
) -> Profile:  # fmt: skip
    """Make a profile and write it into the folder `out`, all or nothing.

    Finished batches of samples are files in `out`.partial at once; seconds are taken in one go, after them. Under `accelerate launch` the
    processes share the batches among them, and the first one takes the seconds.

    Args:
        target, draft, companion: loaded decoder-only models with one tokenizer; the draft may be a drafter on the target's states.
        texts: prompts, not those that speed will be measured on.
        resume: go on with an unfinished profile of the same models, prompts and settings.
        source: where they come from, for the record.

    Raises: `ValueError`, one line, for models that cannot be used and for too few samples.
    """
    out, part = folders(out)
    check_new(out, "profile again")
    if len(texts) < 2:
        raise ValueError(f"at least 2 prompts are needed, for some are held out; got {len(texts)}: pass more prompts")
    refuse_models("profiling", target, draft)
    Runner(LossyPolicy(filter=ObserveOnlyFilter(companion)), draft).validate(target)
    processes = Processes.started()
    here = facts(target, draft, companion, tokenizer, texts, settings)
    with start_run(out, part, here, STARTED, resume=resume, processes=processes):
        return _profile((target, draft, companion), tokenizer, texts, out, part, settings, processes, source)


def _profile(
    models: tuple[Any, Any, Any], tokenizer: Any, texts: Sequence[str], out: Path, part: Path,
    settings: ProfileSettings, processes: Processes, source: str,
) -> Profile:  # fmt: skip
    """`profile`, of models that it takes, in a folder that it holds."""
    target, draft, companion = models
    samples = collect(target, draft, companion, tokenizer, texts, settings, part, processes)
    if len(samples.x) < FEWEST:
        processes.wait()
        if processes.first:
            clear(part, STARTED)
        raise ValueError(
            f"{len(texts)} prompts gave {len(samples.x)} drafted tokens; at least {FEWEST} are needed: pass more prompts"
        )
    fitted, kept, metrics = report(samples, settings.seed)
    bins, gamma = build(fitted, *SHAPES[-1][1:]), settings.gamma[-1]
    if not processes.first:  # one process measures seconds, while the others rest
        processes.wait()
        return Profile.from_pretrained(out)
    latency = measure(target, draft, companion, tokenizer, texts, settings, bins)
    metrics[ALTERNATIVES] = measure_alternatives(target, draft, tokenizer, texts, settings)
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
        machine=describe_machine(target.device),
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
    processes.wait()
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
