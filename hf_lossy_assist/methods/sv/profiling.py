"""Make SV's profile: how often the target accepts a drafted token for given S and A, and the cost of a round on this machine.

Kim et al., "Speculative Verification" (huggingface.co/papers/2509.24328), §4.2, §5 and Appendix A.2. Both come from strict decoding
with the real engine: samples with the companion reading along, seconds with random numbers of verified tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...artifacts.cards import README
from ...artifacts.conditions import describe_machine
from ...artifacts.files import check_new
from ...artifacts.identity import ModelIdentity, tokenizer_hash, versions
from ...artifacts.sv_profile import MODELS, Profile
from ...drafters.hidden_state import DraftModel, refuse_models
from ...drafters.parallel import longest_draft
from ...generation.runner import Runner
from ...policy.policy import LossyPolicy
from ...training.jobs import describe_run
from ...training.processes import Processes
from ...training.run_folder import RunFolder
from .acceptance_table import CELLS, build_table, predict_speed, split_samples
from .collect_samples import STARTED, ObserveOnlyFilter, Profiled, ProfileSettings, collect
from .round_costs import measure_latency


DEFAULTS = ProfileSettings()
FEWEST = 1000  # samples: about four for each cell of the finest table


def profile(
    target: PreTrainedModel, draft: DraftModel, companion: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], out: str | Path,
    settings: ProfileSettings = DEFAULTS, *, resume: bool = False, source: str = "",
) -> Profile:  # fmt: skip
    """Make a profile and write it into the folder `out`, all or nothing.

    Each finished batch of samples becomes a file in `out`.partial at once; seconds are measured afterwards, in one go. Processes started by
    `accelerate launch` share the batches, and the first one measures the seconds.

    Args:
        target, draft, companion: loaded decoder-only models with one tokenizer; the draft may be a drafter on the target's states.
        texts: prompts, other than those that speed will be measured on.
        resume: continue an unfinished profile of the same models, prompts and settings.
        source: where the prompts come from, for the record.

    Raises: `ValueError`, one line, for models that cannot be used and for too few samples.
    """
    check_new(out, "profile again")
    if len(texts) < 2:
        raise ValueError(f"at least 2 prompts are needed, for some are held out; got {len(texts)}: pass more prompts")
    refuse_models("profiling", target, draft)
    Runner(LossyPolicy(filter=ObserveOnlyFilter(companion)), draft).validate(target)
    most, gamma = longest_draft(draft), settings.gamma[-1]
    if most is not None and gamma > most:
        raise ValueError(
            f"gamma: this draft writes at most {most} tokens a round, got {gamma}: pass gammas of at most {most}"
        )
    processes = Processes.started()
    models = dict(zip(MODELS, (target, draft, companion), strict=True))
    facts = describe_run(settings.to_dict(), models, tokenizer, texts, source)
    with RunFolder.opened(out, STARTED, facts, resume=resume, processes=processes) as run:
        profiled = Profiled(target, draft, companion, tokenizer, texts, settings)
        samples = collect(profiled, run)
        if len(samples.x) < FEWEST:
            processes.wait()
            processes.on_first(run.clear)
            raise ValueError(
                f"{len(texts)} prompts gave {len(samples.x)} drafted tokens; at least {FEWEST} are needed: pass more prompts"
            )
        fitted, held_out, metrics = split_samples(samples, settings.seed)
        bins = build_table(fitted, *CELLS, adaptive=True)
        if not processes.first:  # one process measures seconds while the others wait
            processes.wait()
            return Profile.from_pretrained(out)
        latency = measure_latency(profiled, bins)
        pays = [predict_speed(bins, latency, held_out, int(b), gamma, settings.seed) for b in latency.batches]
        measured = Profile(
            bins=bins,
            latency=latency,
            gamma=gamma,
            pays=np.array(pays),
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
        with run.result() as folder:
            measured.write(folder)
            measured.card().save(folder / README)
        processes.wait()
        return measured
