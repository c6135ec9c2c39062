"""`hf-lossy profile`: measure the tables by which SV decides."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from .. import artifacts, methods
from ..artifacts.files import check_new
from ..terminal import console, show, table
from ..validation import MOST, MOST_NEW_TOKENS, MOST_ROWS, require
from . import _models, _options
from ._runs import hint_resume


PROFILED = 512  # prompts, as in the paper
SAMPLED = _options.SamplingOptions(do_sample=True)


@_options.command
def profile_command(
    *,
    out: _options.Out,
    models: _options.ModelOptions,
    companion: _options.Companion = None,
    prompts: _options.Prompts = _options.DEMO,
    limit: Annotated[int | None, (1, MOST), "most prompts to use (default: all; 512 of the demo)"] = None,
    gamma: Annotated[list[int] | None, "draft length to profile; repeatable (default: 5 and 7)"] = None,
    max_new_tokens: Annotated[int, (4, MOST_NEW_TOKENS), "new tokens of each prompt"] = 64,
    batch_size: Annotated[str, "prompts at a time while rounds are timed; several with commas: 1,8"] = "1,4,16,32,64",
    sample_batch_size: Annotated[int, (1, MOST_ROWS), "prompts at a time while samples are taken"] = 16,
    rounds: Annotated[int, "rounds timed for each number of verified tokens"] = 8,
    sampling: _options.SamplingOptions = SAMPLED,
    running: _options.RunOptions,
    loading: _options.LoadOptions,
    chat: _options.Chat = False,
) -> None:
    """Measure the tables by which SV decides: how often the target accepts what draft and companion agree on, and the cost of rounds here.

    Texts are sampled, as in the paper; for greedy decoding pass --greedy.

    Examples:

      hf-lossy profile --prompts demo --limit 128 --out profile

      hf-lossy profile --drafter demo --limit 128 --out profile

      hf-lossy profile --model M --assistant D --companion C --prompts questions.jsonl --chat --batch-size 8,32 --out profile
    """
    require("this command", "sklearn", "jinja2")
    models.check_learnable()
    if models.model is not None and companion is None:
        raise ValueError(f"--model needs --companion beside it: a path, Hub id, or {_options.INT8}")
    _options.check_prompts(prompts, models.model)
    sampling.check()
    sizes = _options.read_batch_sizes(batch_size)
    check_new(out, "profile again")  # before models are loaded

    lengths = tuple(gamma or methods.ProfileSettings.gamma)
    settings = methods.ProfileSettings(
        gamma=lengths,
        new_tokens=max_new_tokens,
        batch_size=sample_batch_size,
        batches=tuple(sizes),
        rounds=rounds,
        **asdict(sampling),
    )
    read, source = _models.read_prompt_texts(prompts, limit, PROFILED, sampling.seed)
    texts = [text.prompt for text in read]
    target, draft, tokenizer = _models.load_models(models, loading)
    third = _models.load_companion(companion or _options.DEMO, target, draft, tokenizer)
    texts = _models.with_template(tokenizer, texts) if chat else texts
    with hint_resume(out):
        measured = methods.profile(
            target, draft, third, tokenizer, texts, out, settings, resume=running.resume, source=source
        )
    _show(measured, out)


def _show(profile: "artifacts.sv_profile.Profile", out: Path) -> None:
    metrics, latency = profile.metrics, profile.latency
    show(f"{metrics['samples']} drafted tokens, of which strict acceptance takes {metrics['acceptance']:.1%}\n")
    rounds = table("rows", "a draft\nstep", "nothing\nverified", "all\nverified", "companion", "noise", "SV ×\nstrict")
    for i, batch in enumerate(latency.batches):
        seconds = (latency.step[i], latency.seconds[i][0], latency.seconds[i][-1], latency.companion[i])
        rounds.add_row(
            str(batch), *(f"{s * 1e3:.2f}" for s in seconds), f"{latency.noise[i]:.0%}", f"{profile.pays[i]:.2f}"
        )
    console().print(rounds)
    show(
        f"ms of a draft step, and of a round but its drafting, γ = {profile.gamma}; noise: half the spread of the\n"
        f"middle half of the rounds; the last column is predicted ({profile.machine})\n"
    )
    used = [str(batch) for batch in latency.batches.tolist() if profile.worthwhile(batch)]
    line = f"pays at {', '.join(used)} rows" if used else "does not pay, so it leaves its companion out and is strict"
    show(
        f"{out}: by this prediction SV {line}; measure it beside others: "
        f"hf-lossy compare --policies strict,svip,sv:profile={out}"
    )
