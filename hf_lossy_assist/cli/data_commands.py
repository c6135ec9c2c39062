"""`hf-lossy collect`, `mine` and `profile`: data for heads and drafters, and the tables by which SV decides."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .. import methods, tasks, training
from ..artifacts.files import read_object
from ..tasks.prompts import CONTINUATIONS, PromptText
from ..terminal import show
from ..validation import MOST, MOST_NEW_TOKENS, MOST_ROWS, MOST_THREADS, nearest, require
from . import _models, _options
from ._runs import check_out, find_workers


if TYPE_CHECKING:
    from ..artifacts.sv_profile import Profile

MIX, LAMBDA = 0.15, 1.2
METHODS = ("sprinter", "specdec", "eagle3")  # methods that are trained on collected data
ANSWER, ROW = 256, 64  # new tokens of an answer for EAGLE-3, and of a row for a head
MINED, PROFILED = 64, 512  # problems of the demo without --limit; prompts, as in SV's paper
RESPONSE, DEMO_RESPONSE = 512, 96  # tokens of a mined response
SAMPLED = _options.SamplingOptions(do_sample=True)


@_options.command
def collect_command(
    *,
    out: _options.Out,
    models: _options.ModelOptions,
    prompts: _options.Prompts = _options.DEMO,
    method: Annotated[
        str,
        "--for",
        "a head: sprinter (four rows a prompt) or specdec (one); or a drafter on the target's states: eagle3",
    ] = METHODS[0],
    mix: Annotated[
        float | None, f"share of draft tokens that the target's replace, for specdec (default: {MIX})"
    ] = None,
    lam: Annotated[
        float | None, "--lambda", f"label a token acceptable where q(x) ≤ λ·p(x) (default: {LAMBDA})"
    ] = None,
    answered: Annotated[
        bool,
        "--written",
        "for eagle3: --prompts, such as a server's log, has its answers too, as `continuation`, all that followed; without end tokens, one below --max-new-tokens has ended",
    ] = False,
    limit: Annotated[int | None, (1, MOST), "most prompts to use (default: all; 64 of the demo)"] = None,
    max_new_tokens: Annotated[
        int | None, (1, MOST_NEW_TOKENS), f"most new tokens of each row (default: {ROW}; {ANSWER} for eagle3)"
    ] = None,
    batch_size: _options.BatchSize = 8,
    seed: _options.Seed = 0,
    do_sample: Annotated[
        bool | None,
        "--do-sample/--greedy",
        "sample, or take the likeliest token each time (default: sample; greedy for eagle3)",
    ] = None,
    temperature: _options.Temperature = 1.0,
    top_k: _options.TopK = 0,
    top_p: _options.TopP = 1.0,
    job: _options.JobOptions,
) -> None:
    """Collect training data for a head on the draft: the draft's state at each token, and the token's probability in both models.

    Texts are sampled, as in the papers; for greedy decoding pass --greedy. With --for eagle3 the target alone answers the prompts.

    Examples:

      hf-lossy collect --model M --assistant D --prompts questions.jsonl --chat --limit 256 --out data

      hf-lossy collect --for specdec --model M --assistant D --prompts questions.jsonl --out data

      hf-lossy collect --for eagle3 --model M --prompts questions.jsonl --chat --out texts

      hf-lossy collect --for eagle3 --model M --prompts log.jsonl --written --chat --out texts
    """
    require("this command", "accelerate", "datasets", "jinja2")
    check_out(out, job.resume)
    if method not in METHODS:
        raise ValueError(f"--for: {nearest('method', method, METHODS)}")
    for_head = method != "eagle3"
    if for_head:
        models.check_learnable(drafters=False)
    elif models.assistant is not None or models.drafter is not None:
        raise ValueError("--for eagle3: the target alone answers: leave --assistant and --drafter out")
    takers_of = (
        ("--lambda", lam, METHODS[:2]),
        ("--mix", mix, METHODS[1:2]),
        ("--written", answered or None, METHODS[2:]),
    )
    for option, value, takers in takers_of:
        if value is not None and method not in takers:
            raise ValueError(f"{option} is for --for {' and '.join(takers)}, not {method}: leave it out")
    do_sample = for_head if do_sample is None else do_sample
    sampling = _options.SamplingOptions(
        do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    _options.check_source(prompts, models.model)
    names = CONTINUATIONS[:1] if answered else CONTINUATIONS  # `answer` and `reference` are a person's
    texts, source = _models.read_prompt_texts(prompts, limit, _options.DEMO_PROMPTS, seed, names)
    new_tokens = (ROW if for_head else ANSWER) if max_new_tokens is None else max_new_tokens
    common: dict[str, Any] = asdict(sampling) | {"new_tokens": new_tokens, "batch_size": batch_size}
    settings: Any
    if for_head:
        if method == "specdec":
            common["mix"] = MIX if mix is None else mix
        settings = methods.CollectSettings(lam=LAMBDA if lam is None else lam, **common)
    else:
        settings = methods.TextSettings(**common)
    load = _models.load_models if for_head else _models.load_target
    processes = find_workers(job, models, load)
    target, draft, tokenizer = load(models, job)
    if job.chat:
        written = _models.with_template(tokenizer, [text.prompt for text in texts])
        texts = [PromptText(prompt, text.continuation) for prompt, text in zip(written, texts, strict=True)]
    run: dict[str, Any] = {"resume": job.resume, "source": source, "processes": processes}
    if for_head:
        methods.collect(target, draft, tokenizer, texts, out, settings, **run)
        rows = len(training.run_folder.load_rows(out))
        what = f"{rows} tokens of {len(texts)} prompts, with a data card"
    else:
        run["written"] = [text.continuation or "" for text in texts] if answered else ()
        methods.collect_texts(target, tokenizer, [text.prompt for text in texts], out, settings, **run)
        what = f"answers to {len(texts)} prompts, {methods.TextDataset(out, target).count_ended()} ended"
    show(f"{out}: {what}")


@_options.command
def mine_command(
    *,
    out: _options.Out,
    models: _options.ModelOptions,
    task: Annotated[str, "demo, gsm8k, math, code, or a file of JSON lines (exact match)"] = _options.DEMO,
    data: _options.Data = None,
    shots: _options.Shots = 0,
    limit: Annotated[int | None, (1, MOST), f"most problems to mine (default: all; {MINED} of the demo)"] = None,
    max_new_tokens: Annotated[
        int | None, f"most tokens of a whole response (default: {RESPONSE}; {DEMO_RESPONSE} for the demo)"
    ] = None,
    batch_size: Annotated[int, (1, MOST_ROWS), "problems in flight"] = 16,
    allow_code_execution: Annotated[
        bool, "--allow-code-execution", "run the programs that a model writes for --task code (docs/security.md)"
    ] = False,
    no_sandbox: Annotated[bool, "--no-sandbox", "run them with your rights where there is no bubblewrap"] = False,
    workers: Annotated[int, (1, MOST_THREADS), "threads for running programs"] = 4,
    max_mismatches: Annotated[int | None, "most mismatches of a problem; further ones are counted"] = None,
    max_seconds: Annotated[float | None, "most seconds for a problem; then it is cut short"] = None,
    seed: _options.Seed = 0,
    job: _options.JobOptions,
) -> None:
    """Mine the tokens whose replacement by the draft's changes the answer (AutoJudge, Algorithm 1).

    Examples:

      hf-lossy mine --task demo --limit 64 --out mined

      hf-lossy mine --model M --assistant D --task gsm8k --data train.jsonl --chat --max-seconds 120 --out mined
    """
    require("this command", "accelerate", "datasets", "jinja2")
    check_out(out, job.resume)
    models.check_learnable(drafters=False)
    for_demo = task == _options.DEMO
    _options.check_source(task, models.model)
    usual = DEMO_RESPONSE if for_demo else RESPONSE
    settings = methods.MineSettings(
        max_new_tokens=usual if max_new_tokens is None else max_new_tokens,
        max_mismatches=max_mismatches,
        max_seconds=max_seconds,
    )
    chosen = tasks.load.load_task(
        task, data=data, split="calibration", seed=seed, shots=shots, chat=job.chat,
        allow_code_execution=allow_code_execution, sandbox=not no_sandbox,
    )  # fmt: skip
    problems = chosen.problems(MINED if limit is None and for_demo else limit)
    processes = find_workers(job, models, _models.load_models)
    target, draft, tokenizer = _models.load_models(models, job)
    wrap = (lambda text: _models.with_template(tokenizer, [text])[0]) if job.chat else str
    source = _models.name_demo_source(seed) if for_demo else (data or Path(task)).name
    methods.mine(
        target, draft, tokenizer, chosen, problems, out, settings,
        batch_size=batch_size, workers=workers, resume=job.resume, wrap=wrap, source=source,
        processes=processes,
    )  # fmt: skip
    if processes.first:
        show(_summarize(out))


def _summarize(out: Path) -> str:
    """Return a description of a dataset in a few lines; remove one without a mismatch, so that its name is free again.

    Raises: `ValueError` with the reason why there is none.
    """
    facts = read_object(out / methods.RECORD)
    counts = facts["found"]
    if not counts["mismatches"]:
        shutil.rmtree(out)
        raise ValueError(f"nothing to fit a judge to, and nothing is written: {methods.explain_nothing(facts)}")
    share = counts["important"] / counts["mismatches"]
    lines = [
        f"{out}: {counts['mismatches']} mismatches of {facts['problems']} problems, "
        f"{counts['important']} important ({share:.1%}), with a data card"
    ]
    lines += methods.explain_unsearched(facts)
    if counts["cut_by_mismatches"]:
        lines.append(f"{counts['cut_by_mismatches']} problems were cut off at --max-mismatches")
    return "\n".join(lines)


@_options.command
def profile_command(
    *,
    out: _options.Out,
    models: _options.ModelOptions,
    companion: Annotated[
        str | None,
        f"sv's companion model: a folder, a Hub id or {_options.INT8} (the draft in int8) (default: the demo's)",
    ] = None,
    prompts: _options.Prompts = _options.DEMO,
    limit: Annotated[int | None, (1, MOST), f"most prompts to use (default: all; {PROFILED} of the demo)"] = None,
    gamma: Annotated[list[int] | None, "draft length to profile; repeatable (default: 5 and 7)"] = None,
    max_new_tokens: Annotated[int, (4, MOST_NEW_TOKENS), "new tokens of each prompt"] = 64,
    batch_size: Annotated[str, "prompts at a time while rounds are timed; several with commas: 1,8"] = "1,4,16,32,64",
    sample_batch_size: Annotated[int, (1, MOST_ROWS), "prompts at a time while samples are taken"] = 16,
    rounds: Annotated[int, "rounds timed for each number of verified tokens"] = 8,
    sampling: _options.SamplingOptions = SAMPLED,
    resume: _options.Resume = False,
    loading: _options.LoadOptions,
    chat: _options.Chat = False,
) -> None:
    """Measure the tables by which SV decides: how often the target accepts what draft and companion agree on, and the cost of rounds here.

    Texts are sampled, as in the paper; for greedy decoding pass --greedy.

    Examples:

      hf-lossy profile --prompts demo --limit 128 --out profile

      hf-lossy profile --model M --assistant D --companion C --prompts questions.jsonl --chat --batch-size 8,32 --out profile
    """
    require("this command", "sklearn", "jinja2")
    models.check_learnable()
    if models.model is not None and companion is None:
        raise ValueError(f"--model needs --companion beside it: a path, Hub id, or {_options.INT8}")
    _options.check_source(prompts, models.model)
    check_out(out, resume)
    kind = methods.ProfileSettings
    settings = kind(
        gamma=tuple(gamma or kind.gamma),
        new_tokens=max_new_tokens,
        batch_size=sample_batch_size,
        batches=tuple(_options.read_batch_sizes(batch_size)),
        rounds=rounds,
        **asdict(sampling),
    )
    read, source = _models.read_prompt_texts(prompts, limit, PROFILED, sampling.seed)
    texts = [text.prompt for text in read]
    target, draft, tokenizer = _models.load_models(models, loading)
    third = _models.load_companion(companion or _options.DEMO, target, draft, tokenizer)
    texts = _models.with_template(tokenizer, texts) if chat else texts
    measured = methods.profile(target, draft, third, tokenizer, texts, out, settings, resume=resume, source=source)
    _show_profile(measured, out)


def _show_profile(profile: "Profile", out: Path) -> None:
    metrics, latency = profile.metrics, profile.latency
    show(f"{metrics['samples']} drafted tokens, of which strict acceptance takes {metrics['acceptance']:.1%}")
    pays = [str(batch) for batch in latency.batches.tolist() if profile.worthwhile(batch)]
    line = f"pays at {', '.join(pays)} rows" if pays else "does not pay, so it leaves its companion out and is strict"
    show(
        f"{out}: by this prediction SV {line}; measure it beside others: "
        f"hf-lossy compare --policies strict,svip,sv:profile={out}"
    )
