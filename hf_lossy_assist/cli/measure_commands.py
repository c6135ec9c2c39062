"""`hf-lossy compare`, `tune` and `report`: which policy is fastest for models on prompts, and what it costs."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hf_lossy_assist as hla

from .. import artifacts, evaluation, policy
from .. import models as model_room
from ..terminal import PlainConsole, console, digits, show, show_json, table
from ..validation import LONGEST_DRAFT, MOST, require
from . import _models, _options, _runs


if TYPE_CHECKING:
    from ..evaluation.metrics import ArmMetrics
    from ..evaluation.tuning import Search, SearchSpace, TuningResult

TRIED = 400  # problems of `tune` without --limit
WRITTEN = "run.json, answers.jsonl, summary.csv"


@_options.command
def compare_command(
    *,
    models: _options.DraftOptions,
    policies: Annotated[
        str, "policies with commas between them: svip,top_k:k=4+svip,strict+fallback, JSON or folders"
    ] = "strict,svip,svip+fallback",
    prompts: _options.PromptsFile = None,
    task: Annotated[str | None, "demo, gsm8k, math, or a JSON-lines file"] = None,
    data: _options.Data = None,
    shots: _options.Shots = 0,
    batch_size: Annotated[str, "prompts at a time; several with commas: 1,8"] = "1",
    limit: Annotated[int | None, (1, MOST), "most prompts (default: all; 12 of the demo)"] = None,
    max_new_tokens: _options.NewTokens = 128,
    gamma: Annotated[int, (1, LONGEST_DRAFT), "draft length of Transformers' assisted generation and of strict"] = 5,
    compile_rounds: Annotated[bool, "--compile", "measure the compiled form of each policy too"] = False,
    static: Annotated[bool, "--static/--no-static", "measure the target compiled with a static cache"] = True,
    out: _options.OptionalOut = None,
    sampling: _options.SamplingOptions,
    job: _options.JobOptions,
    as_json: _options.AsJson = False,
) -> None:
    """Compare policies with the target alone and Transformers' assisted generation, and recommend one. Several drafts are compared in one run.

    Examples:

      hf-lossy compare

      hf-lossy compare --assistant demo --assistant exit:2 --assistant suffix --policies strict,svip

      hf-lossy compare --model M --assistant D --prompts questions.jsonl --chat --limit 16 --batch-size 1,8

      hf-lossy compare --model M --assistant D --task gsm8k --data test.jsonl --policies svip,top_k:k=4+svip --out found

      hf-lossy compare --policies strict,autojudge,sprinter:head=head,threshold=0.9 --no-static
    """
    require("this command", "scipy")
    sizes = _options.read_batch_sizes(batch_size)
    _runs.check_out(out, job.resume)
    decoding = evaluation.writer.DecodingSettings(max_new_tokens=max_new_tokens, **asdict(sampling))
    chosen = _read_policies(policies, gamma, models.demo)
    questions, problems, scoring, source = _runs.read_problems(
        prompts, task, data, models.model, limit, sampling.seed, shots
    )
    batches = evaluation.comparison.list_batches(len(questions), sizes)
    processes = _runs.find_workers(job, models, _models.load_drafts, timed=True)
    loaded = _models.load_drafts(models, job)
    texts = _models.with_template(loaded[2], questions) if job.chat else questions
    left_out = {"target compiled": why} if (why := evaluation.arms.why_not_static(loaded[0])) and static else {}
    longest = max(len(ids) for ids in loaded[2](texts)["input_ids"])
    capacity = longest + max_new_tokens if static and not left_out else None

    def make(loaded: "evaluation.arms.Loaded") -> "tuple[evaluation.writer.TextWriter, list[evaluation.arms.Arm]]":
        target, drafts, tokenizer = loaded
        arms = evaluation.arms.make_arms(
            target, drafts, chosen, tokenizer=tokenizer, gamma=gamma, capacity=capacity, compiled=compile_rounds
        )
        return evaluation.writer.TextWriter(target, tokenizer, decoding, scoring), arms

    (writer, arms), comparison, facts = make(loaded), evaluation.comparison, dict[str, Any]()
    if out is not None:
        facts = comparison.describe_comparison(writer, loaded[1], arms, texts, source, sizes, problems, processes)
    with comparison.open_run(out, facts, job.resume, processes) as run:
        result = comparison.compare_arms(writer, arms, texts, batches, run, problems=problems, loaded=(loaded, make))
        left_out |= result.left_out
        advice = {size: evaluation.recommend.recommend(result.metrics, size) for size in sorted(set(sizes))}
        if out is not None and processes.first:
            seconds = result.warm_up_seconds
            comparison.finish_run(run, result.metrics, advice=advice, left_out=left_out, warm_up_seconds=seconds)
    if not processes.first:
        return
    if as_json:
        figures = [row.to_dict() for row in result.metrics]
        show_json({"figures": figures, "advice": advice, "left_out": left_out})
        return
    dtype = model_room.introspection.dtype_of(loaded[0])
    for size, line in advice.items():
        show_metrics(console(highlight=False), [row for row in result.metrics if row.batch_size == size], dtype)
        show(line)
    for name, why in left_out.items():
        show(f"{name} was not measured: {why}")
    if out is not None:
        show(f"\n{out}: {WRITTEN}")


def show_metrics(screen: PlainConsole, metrics: "Sequence[ArmMetrics]", dtype: str, stage: str = "") -> None:
    """Print the tables of one batch size. `dtype`: the target's precision; `stage`: of a search."""
    size, prompts = metrics[0].batch_size, metrics[0].prompts
    screen.print(f"\nbatch size {size}, {prompts} prompts{stage}; in brackets 95 % intervals\n")
    for rows in zip(*(evaluation.metrics.format_row(arm, dtype) for arm in metrics), strict=True):
        heads = [head for head in rows[0] if any(row[head] != evaluation.metrics.NONE for row in rows)]
        if heads:
            printed = table("", *heads)
            for arm, row in zip(metrics, rows, strict=True):
                printed.add_row(arm.arm, *(row[head].replace(" up to", "\nup to") for head in heads))
            screen.print(printed)
            screen.print()


def _read_policies(texts: str, gamma: int, demo_models: bool) -> "dict[str, hla.LossyPolicy]":
    """Read `--policies`, each under the name that it has there.

    Strict acceptance drafts as many tokens as Transformers' arm. With the demo's models a method's bare name uses the demo's head.
    """
    read = {name: _models.read_policy(name, demo_models) for name in policy.parse.split_policies(texts)}
    stop = hla.Constant(gamma)
    return {name: chosen if chosen.stop is not None else replace(chosen, stop=stop) for name, chosen in read.items()}


@_options.command
def tune_command(
    *,
    models: _options.ModelOptions,
    task: Annotated[str, "a task whose right answers are known: gsm8k, math or a JSON-lines file"] = _options.DEMO,
    data: _options.Data = None,
    max_loss: Annotated[float, (1e-6, 1.0), "the largest rate of harm: 0.01 is one answer in a hundred"] = 0.01,
    confidence: Annotated[float, (0.5, 1 - 1e-9), "that the certificate is right"] = 0.95,
    policies: Annotated[
        str, "what to try, lossless ones among it; a rule without its parameter is tried from strict to lax"
    ] = "svip,strict,top_k+svip,lenience+svip,typical+svip",
    limit: Annotated[int | None, (1, MOST), f"most problems (default: all; {TRIED} of the demo)"] = None,
    first: Annotated[
        int | None, (1, MOST), "problems that settings are tried on; the others certify (default: a fifth)"
    ] = None,
    shots: _options.Shots = 0,
    batch_size: _options.BatchSize = 1,
    max_new_tokens: _options.NewTokens = 256,
    out: _options.OptionalOut = None,
    sampling: _options.SamplingOptions,
    job: _options.JobOptions,
    as_json: _options.AsJson = False,
) -> None:
    """Find the fastest policy whose loss of right answers is certified to be small.

    A harm is an answer that the target alone has right and the policy wrong. Settings are tried on some problems and certified on others.

    Examples:

      hf-lossy tune --out tuned

      hf-lossy tune --model M --assistant D --task gsm8k --data test.jsonl --chat --max-loss 0.02 --out tuned
    """
    require("this command", "scipy", "jinja2")
    _runs.check_out(out, job.resume)
    decoding = evaluation.writer.DecodingSettings(max_new_tokens=max_new_tokens, **asdict(sampling))
    space = evaluation.tuning.parse_search_space(policy.parse.split_policies(policies))
    limit = TRIED if limit is None and task == _options.DEMO else limit
    _, problems, scoring, source = _runs.read_problems(None, task, data, models.model, limit, sampling.seed, shots)
    problems = _runs.remove_duplicates(problems, source)
    texts = [problem.prompt for problem in problems]
    search = evaluation.tuning.Search(
        max_loss, 1 - confidence, _count_first(first, len(texts), batch_size), batch_size
    )
    if not as_json:
        certifying = len(texts) // batch_size * batch_size - search.first
        show(evaluation.tuning.describe_power(certifying, search, len({step.ladder for step in space.steps})))
    processes = _runs.find_workers(job, models, _models.load_models, timed=True)
    target, draft, tokenizer = _models.load_models(models, job)
    texts = _models.with_template(tokenizer, texts) if job.chat else texts
    writer, comparison = evaluation.writer.TextWriter(target, tokenizer, decoding, scoring), evaluation.comparison
    arms = evaluation.arms.make_arms(target, draft, space.policies, tokenizer=tokenizer, assisted=False)
    facts = comparison.describe_comparison(writer, draft, arms, texts, source, [batch_size], problems, processes)
    facts |= {"max_loss": max_loss, "confidence": confidence, "first": search.first}
    with comparison.open_run(out, facts, job.resume, processes) as run:
        result = evaluation.tuning.tune_policies(writer, draft, space, problems, texts, search, run)
        shaping = artifacts.conditions.read_shaping(target.generation_config, sampling.do_sample)
        certificate = evaluation.tuning.make_certificate(result, space, search, facts, asdict(decoding) | shaping)
        advice = _describe(result, search, certificate, sampling.do_sample, facts["target_dtype"])
        chosen = _choose_policy(result, space, certificate)
        if out is not None and processes.first:
            comparison.finish_run(run, result.certified, result.tried, chosen, advice=advice)
    if not processes.first:
        return
    if as_json:
        figures = [row.to_dict() for row in result.certified]
        verdicts = [
            {"policy": row.step.name, **asdict(row.tried), "harm_bound": row.harm, "net_bound": row.net,
             "certified": row.certified} for row in result.results
        ]  # fmt: skip
        show_json({"advice": advice, "certified": figures, "verdicts": verdicts})
        return
    _show_results(result)
    show(advice)
    saved = "" if chosen is None else "policy (LossyPolicy.from_pretrained reads it), "
    show("nothing is written without --out" if out is None else f"{out}: {saved}{WRITTEN}")


def _choose_policy(
    result: "TuningResult", space: "SearchSpace", certificate: "artifacts.certificate.Certificate | None"
) -> "hla.LossyPolicy | None":
    """Return the recommended policy, with its certificate if it is lossy; None if drafting does not pay."""
    if certificate is not None and result.best is not None:
        return replace(space.policies[result.best.step.name], certificate=certificate)
    return space.policies[result.lossless.arm] if result.lossless.of_target.value > 1 else None


def _count_first(first: int | None, problems: int, batch_size: int) -> int:
    """Return the number of problems on which settings are tried, in whole batches."""
    whole = max((problems // 5 if first is None else first) // batch_size, 1) * batch_size
    if whole + batch_size > problems:
        raise ValueError(
            f"{problems} problems are too few for batches of {batch_size}, some to try (--first), some to certify"
        )
    return whole


def _describe(result: "TuningResult", search: "Search", certificate: object, do_sample: bool, dtype: object) -> str:
    times = result.lossless.of_target.value
    lossless = f"{result.lossless.arm} ({result.lossless.guarantee(dtype)}) is {times:.2f} × the target"
    if certificate is not None:
        return f"use {certificate}; {lossless}"
    use = f"use {result.lossless.arm}" if times > 1 else "do not draft here"
    if result.results:
        return f"{use}: {lossless}, and no setting that is clearly faster is certified at {search.max_loss:.2%}"
    sampled = "; sampled texts differ by themselves, and that counts as harm: greedy ones may do" * do_sample
    first = f"the first {search.first} problems{sampled}"
    return f"{use}: {lossless}, and no lossy setting was faster without harm on {first}"


def _show_results(result: "TuningResult") -> None:
    shown = table("candidate", "tokens/s", "harms", "gains", "harm at\nmost", "net at\nmost", "")
    for row in result.results:
        speed, counts = row.tried.speed, (f"{row.tried.harms}/{row.tried.problems}", str(row.tried.gains))
        bounds, verdict = (f"{row.harm:.2%}", f"{row.net:.2%}"), "certified" if row.certified else "–"
        shown.add_row(row.step.name, f"{speed:.{digits(speed)}f}", *counts, *bounds, verdict)
    if result.results:
        console(highlight=False).print(shown)


def _strip_paths(arm: "ArmMetrics") -> "ArmMetrics":
    """Return an arm whose name shows no path of this machine."""
    return replace(arm, arm=policy.parse.strip_paths(arm.policy) + arm.arm.removeprefix(arm.policy))


@_options.command
def report_command(
    *,
    folders: Annotated[list[Path], typer.Argument(help="folders that compare or tune wrote")],
    out: Annotated[Path, "the page to write"] = Path("report.html"),
) -> None:
    """Write the tables of runs, with intervals, to one HTML page without scripts or requests.

    Example:

      hf-lossy report found tuned --out report.html
    """
    require("this command", "scipy")
    artifacts.files.check_file("--out", out)
    page = console(record=True, width=110, file=StringIO(), highlight=False)
    for folder in folders:
        _print_run(page, folder)
    artifacts.files.write_text(out, page.export_html())
    show(f"{out}: {len(folders)} {'folder' if len(folders) == 1 else 'folders'}")


def _print_run(page: PlainConsole, folder: Path) -> None:
    """Print a run; a search has tried settings on its first problems and certified them on the others."""
    record, answers = evaluation.comparison.read_run(folder)
    try:
        names = [record["target"]["id"], ", ".join(record["drafts"]), record["source"], record["machine"]]
        facts = {
            arm: {name: fact.get(name) for name in evaluation.comparison.ARM_FACTS}
            for arm, fact in record["arms"].items()
        }
        arms = [evaluation.arms.Arm(arm, **fact) for arm, fact in facts.items()]
        dtype, first, advice = record["target_dtype"], record.get("first", 0), record["found"].get("advice", {})
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"{folder} was not written by this version of compare or tune: run it again") from None
    page.print(f"\n{folder.name}\n{' with '.join(names[:2])}; {'; '.join([*names[2:], dtype])}", style="bold")
    stages = {", certificate": [answer for answer in answers if answer.prompt >= first]} if first else {"": answers}
    stages |= {", trial": [answer for answer in answers if answer.prompt < first]} if first else {}
    for stage, outputs in stages.items():
        metrics = evaluation.metrics.compute_metrics(outputs, arms)
        for size in sorted({arm.batch_size for arm in metrics}):
            show_metrics(page, [_strip_paths(arm) for arm in metrics if arm.batch_size == size], dtype, stage)
    lines = (
        {"": advice} if isinstance(advice, str) else {f"batch size {size}: ": line for size, line in advice.items()}
    )
    for where, line in lines.items():
        page.print(f"{where}{line}")
