"""Make SV's profile: how often the target accepts a drafted token for given S and A, and the cost of a round on this machine.

Kim et al., "Speculative Verification" (huggingface.co/papers/2509.24328), §4.2, §5 and Appendix A.2. Both come from strict decoding
with the real engine: samples with the companion reading along, seconds with random numbers of verified tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...artifacts.cards import README, write_card
from ...artifacts.conditions import describe_machine
from ...artifacts.files import check_new
from ...artifacts.identity import ModelIdentity, tokenizer_hash, versions
from ...artifacts.profile_tables import Bins, Latency
from ...artifacts.sv_profile import MODELS, Profile, profile_card
from ...drafters.hidden_state import DraftModel, refuse_models
from ...drafters.parallel import longest_draft
from ...filters.goodput import choose
from ...generation.runner import Runner
from ...policy.policy import LossyPolicy
from ...training.head_quality import save_figure
from ...training.jobs import describe_run
from ...training.processes import Processes
from ...training.run_folder import RunFolder
from .acceptance_table import SHAPES, build_table, predict_speed, replay_rounds, split_samples
from .baselines import BASELINES, measure_baselines
from .collect_samples import STARTED, collect
from .profiled_runner import ObserveOnlyFilter, ProfileSettings
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
        samples = collect(target, draft, companion, tokenizer, texts, settings, run)
        if len(samples.x) < FEWEST:
            processes.wait()
            processes.on_first(run.clear)
            raise ValueError(
                f"{len(texts)} prompts gave {len(samples.x)} drafted tokens; at least {FEWEST} are needed: pass more prompts"
            )
        fitted, held, metrics = split_samples(samples, settings.seed)
        bins = build_table(fitted, *SHAPES[-1][1:])
        if not processes.first:  # one process measures seconds while the others wait
            processes.wait()
            return Profile.from_pretrained(out)
        latency = measure_latency(target, draft, companion, tokenizer, texts, settings, bins)
        metrics[BASELINES] = measure_baselines(target, draft, tokenizer, texts, settings)
        pays = [predict_speed(bins, latency, held, int(b), gamma, settings.seed) for b in latency.batches]
        made = Profile(
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
        accept = next(replay_rounds(bins, held, int(latency.batches[-1]), gamma, settings.seed))[0]
        with run.result() as folder:
            made.write(folder)
            plots = {"cells.png": draw_cells(bins), "goodput.png": draw_goodput(accept, latency)}
            for name, figure in plots.items():
                save_figure(figure, folder / name)
            write_card(profile_card(made, [*plots]), folder / README)
        processes.wait()
        return made


def draw_cells(bins: Bins) -> Figure:
    """Plot P̂(accept | S, A) as a heat map; cells are as wide and high as their range of S and A."""
    figure = Figure(figsize=(5.6, 4.6), layout="constrained")
    axes = figure.add_subplot(xlabel="S, agreement of draft and companion", ylabel="A, of the drafted token")
    s = np.concatenate([[0.0], bins.s_edges, [1.0]])
    mesh = None
    for k, row in enumerate(bins.accept):
        a = np.concatenate([[0.0], bins.a_edges[k], [1.0]])
        mesh = axes.pcolormesh(s[k : k + 2], a, row[:, None], vmin=0, vmax=1, cmap="viridis")
    assert mesh is not None, "a profile has at least one cell"
    figure.colorbar(mesh, label="$\\hat{P}$(accepted by the target)")
    return figure


def draw_goodput(accept: np.ndarray, latency: Latency) -> Figure:
    """Plot expected tokens, seconds and their ratio over the tokens verified, and the choice, for a round of `accept` (B, γ) (Figure 2)."""
    batch, gamma = accept.shape
    seconds = latency.of(batch, gamma)
    choice = choose(accept, seconds, float(batch))
    tokens = batch + np.concatenate([[0.0], choice.gains.reshape(-1)[choice.order].cumsum()])
    chosen = int(choice.counts.sum())
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = (
        ("expected tokens", tokens),
        ("ms of the round", seconds * 1e3),
        ("expected tokens per second", tokens / seconds),
    )
    for axes, (label, values) in zip(figure.subplots(1, 3), panels, strict=True):
        axes.plot(range(len(values)), values)
        axes.axvline(chosen, color="gray", linestyle=":", label=f"chosen: {chosen} of {batch * gamma}")
        axes.set(xlabel="drafted tokens verified", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"one round of {batch} rows, γ = {gamma}")
    return figure
