"""`hf-lossy tune`: the fastest setting whose loss is certified."""

from dataclasses import asdict, replace
from typing import Annotated

from .. import artifacts, evaluation, policy
from ..terminal import console, digits, show, show_json, table
from ..validation import MOST, check_int, require
from . import _models, _options, _runs


DEMO_LIMIT = 400


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
    limit: Annotated[int | None, (1, MOST), "most problems (default: all; 400 of the demo)"] = None,
    first: Annotated[int | None, "problems that settings are tried on; the others certify (default: a fifth)"] = None,
    shots: _options.Shots = 0,
    batch_size: _options.BatchSize = 1,
    max_new_tokens: _options.NewTokens = 256,
    out: _options.OptionalOut = None,
    running: _options.RunOptions,
    ray: _options.Ray = None,
    sampling: _options.SamplingOptions,
    loading: _options.LoadOptions,
    chat: _options.Chat = False,
    as_json: _options.AsJson = False,
) -> None:
    """Find the fastest policy whose loss of right answers is certified to be small.

    A harm is an answer that the target alone has right and the policy wrong. Settings are tried on some problems and certified on others.

    Examples:

      hf-lossy tune --out tuned

      hf-lossy tune --drafter demo --limit 100 --out tuned

      hf-lossy tune --model M --assistant D --task gsm8k --data test.jsonl --chat --max-loss 0.02 --out tuned
    """
    require("this command", "scipy", "jinja2")
    sampling.check()
    _runs.check_out(out, running.resume)
    decoding = evaluation.writer.DecodingSettings(max_new_tokens=max_new_tokens, **asdict(sampling))
    space = evaluation.tuning.parse_search_space(policy.parse.split_policies(policies))
    limit = DEMO_LIMIT if limit is None and task == _options.DEMO else limit
    _, problems, scoring, source = _runs.read_problems(None, task, data, models.model, limit, sampling.seed, shots)
    problems = _runs.remove_duplicates(problems, source)
    texts = [problem.prompt for problem in problems]
    search = evaluation.tuning.Search(
        max_loss, 1 - confidence, _count_first(first, len(texts), batch_size), batch_size
    )
    if not as_json:
        certifying = len(texts) // batch_size * batch_size - search.first
        show(evaluation.tuning.describe_power(certifying, search, len({step.ladder for step in space.steps})))
    processes = _runs.find_workers(ray, models, loading, _models.load_models, timed=True)
    target, draft, tokenizer = _models.load_models(models, loading)
    texts = _models.with_template(tokenizer, texts) if chat else texts
    writer = evaluation.writer.TextWriter(target, tokenizer, decoding, scoring)
    arms = evaluation.arms.make_arms(target, draft, space.policies, tokenizer=tokenizer, assisted=False)
    facts = evaluation.results.describe_comparison(
        writer, draft, arms, texts, source, [batch_size], problems, processes
    ) | {"max_loss": max_loss, "confidence": confidence, "first": search.first}
    store: evaluation.results.ResultStore = evaluation.results.ResultStore(processes)
    if out is not None:
        store = evaluation.results.ResultFolder(out, facts, running.resume, processes)
    with _runs.resumable(store):
        found = evaluation.tuning.tune_policies(writer, draft, space, problems, texts, search, store=store)
    if not processes.first:
        return
    settings = asdict(decoding) | artifacts.conditions.read_shaping(target.generation_config, sampling.do_sample)
    folder = store if isinstance(store, evaluation.results.ResultFolder) else None
    _report(found, space, search, facts, settings, folder, as_json)


def _report(
    found: "evaluation.tuning.TuningResult",
    space: "evaluation.tuning.SearchSpace",
    search: "evaluation.tuning.Search",
    facts: dict[str, object],
    decoding: dict[str, float],
    store: "evaluation.results.ResultFolder | None",
    as_json: bool,
) -> None:
    """Write the results into the folder of the run, and print them."""
    certificate = evaluation.tuning.make_certificate(found, space, search, facts, decoding)
    line = _describe(found, search, certificate, bool(decoding["do_sample"]), facts["target_dtype"])
    chosen = _choose_policy(found, space, certificate)
    if store is not None:
        store.finish(found.certified, found.tried, chosen, advice=line)
    if as_json:
        rows = [
            {
                "policy": result.step.name,
                "tokens_per_second": result.tried.speed,
                "harms": result.tried.harms,
                "gains": result.tried.gains,
                "problems": result.tried.problems,
                "harm_bound": result.harm,
                "net_bound": result.net,
                "certified": result.certified,
            }
            for result in found.results
        ]
        show_json({"advice": line, "certified": [figures.to_dict() for figures in found.certified], "verdicts": rows})
        return
    _show_results(found)
    show(line)
    if store is None:
        show("nothing is written without --out")
    else:
        written = "" if chosen is None else "policy (LossyPolicy.from_pretrained reads it), "
        show(f"{store.out}: {written}run.json, answers.jsonl, summary.csv")


def _choose_policy(
    found: "evaluation.tuning.TuningResult",
    space: "evaluation.tuning.SearchSpace",
    certificate: "artifacts.certificate.Certificate | None",
) -> "policy.policy.LossyPolicy | None":
    """Return the recommended policy, with its certificate if it is lossy; None if drafting does not pay."""
    if certificate is not None and found.best is not None:
        return replace(space.policies[found.best.step.name], certificate=certificate)
    return space.policies[found.lossless.arm] if found.lossless.of_target.value > 1 else None


def _count_first(first: int | None, problems: int, batch_size: int) -> int:
    """Return the number of problems on which settings are tried, in whole batches."""
    wanted = max(problems // 5, 1) if first is None else first
    check_int("--first", wanted, 1, max(problems - 1, 1))
    whole = max(wanted // batch_size, 1) * batch_size
    if whole + batch_size > problems:
        raise ValueError(
            f"{problems} problems are too few for batches of {batch_size}, some to try settings and some to certify them"
        )
    return whole


def _describe(
    found: "evaluation.tuning.TuningResult",
    search: "evaluation.tuning.Search",
    certificate: object,
    do_sample: bool,
    dtype: object,
) -> str:
    lossless = f"{found.lossless.arm} ({found.lossless.guarantee(dtype)}) is {found.lossless.of_target.value:.2f} × the target"
    if certificate is not None:
        return f"use {certificate}; {lossless}"
    use = f"use {found.lossless.arm}" if found.lossless.of_target.value > 1 else "do not draft here"
    if not found.results:
        sampled = (
            "; sampled texts differ by themselves, and that counts as harm: greedy ones may do" if do_sample else ""
        )
        return f"{use}: {lossless}, and no lossy setting was faster without harm on the first {search.first} problems{sampled}"
    return f"{use}: {lossless}, and no setting that is clearly faster is certified at {search.max_loss:.2%}"


def _show_results(found: "evaluation.tuning.TuningResult") -> None:
    if not found.results:
        return
    shown = table("candidate", "tokens/s", "harms", "gains", "harm at\nmost", "net at\nmost", "")
    for result in found.results:
        tried = result.tried
        shown.add_row(
            result.step.name,
            f"{tried.speed:.{digits(tried.speed)}f}",
            f"{tried.harms}/{tried.problems}",
            str(tried.gains),
            f"{result.harm:.2%}",
            f"{result.net:.2%}",
            "certified" if result.certified else "–",
        )
    console(highlight=False).print(shown)
