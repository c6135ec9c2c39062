"""`hf-lossy tune`: the fastest setting whose loss is certified."""

from dataclasses import asdict, replace
from typing import Annotated, Any

from ..terminal import console, digits, show, show_json, table
from ..validation import MOST_ROWS, check_int, check_number
from ._models import load_models, with_template
from ._options import (
    DEMO,
    AsJson,
    Chat,
    Data,
    LoadOptions,
    ModelOptions,
    OptionalOut,
    RunOptions,
    SamplingOptions,
    Shots,
    command,
    needs,
)
from ._provenance import models_from, parts_in, remember, sources_in, warn_of_other_decoding
from ._runs import arm_facts, check_decoding, check_out, distinct, end_after, facts_of, progress, prompts_of, resumable


DEMO_LIMIT = 400


@command
def tune(
    *,
    models: ModelOptions,
    task: Annotated[str, "a task whose right answers are known: gsm8k, math or a JSON-lines file"] = DEMO,
    data: Data = None,
    max_loss: Annotated[float, "the largest rate of harm: 0.01 is one answer in a hundred"] = 0.01,
    confidence: Annotated[float, "that the certificate is right"] = 0.95,
    policies: Annotated[
        str, "what to try, lossless ones among it; a rule without its parameter is tried from strict to lax"
    ] = "svip,strict,top_k+svip,lenience+svip,typical+svip",
    limit: Annotated[int | None, "most problems (default: all; 400 of the demo)"] = None,
    first: Annotated[int | None, "problems that settings are tried on; the others certify (default: a fifth)"] = None,
    shots: Shots = 0,
    batch_size: Annotated[int, "prompts at a time"] = 1,
    max_new_tokens: Annotated[int, "most new tokens of each text"] = 256,
    out: OptionalOut = None,
    running: RunOptions,
    sampling: SamplingOptions,
    loading: LoadOptions,
    chat: Chat = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest policy whose loss of right answers is certified to be small.

    Harm is an answer that the target alone has right and the policy wrong. Settings are tried on some problems and certified on others.

    Examples:

      hf-lossy tune --out tuned

      hf-lossy tune --drafter demo --limit 100 --out tuned

      hf-lossy tune --model M --assistant D --task gsm8k --data test.jsonl --chat --max-loss 0.02 --out tuned
    """
    end_after(running.max_hours)
    needs("train", "scipy")
    models.check()
    check_number("--max-loss", max_loss, 1e-6, 1.0)
    check_number("--confidence", confidence, 0.5, 1 - 1e-9)
    check_int("--batch-size", batch_size, 1, MOST_ROWS)
    check_decoding(max_new_tokens, sampling)
    check_out(out, running.resume)
    from ..artifacts.conditions import read_shaping
    from ..evaluation.arms import make_arms
    from ..evaluation.measuring import DecodingSettings, Writer
    from ..evaluation.results import ResultFolder, ResultStore
    from ..evaluation.tuning import Search, describe_power, parse_search_space
    from ..evaluation.tuning import tune as run
    from ..policy.parse import split_policies
    from ..training.processes import Processes

    processes = Processes.started()
    decoding = DecodingSettings(max_new_tokens=max_new_tokens, **asdict(sampling))
    field = parse_search_space(split_policies(policies))
    limit = DEMO_LIMIT if limit is None and task == DEMO else limit
    parts = [part for policy in field.policies.values() for part in parts_in(policy)]
    names = models_from(models, sources_in(parts))
    _, problems, scoring, source = prompts_of(None, task, data, names.model, limit, sampling.seed, shots)
    problems = distinct(problems, source)
    texts = [problem.prompt for problem in problems]
    search = Search(max_loss, 1 - confidence, _first(first, len(texts), batch_size), batch_size)
    if not as_json:
        certifying = len(texts) // batch_size * batch_size - search.first
        show(describe_power(certifying, search, len({step.ladder for step in field.steps})))
    target, draft, tokenizer = load_models(names, loading)
    texts = with_template(tokenizer, texts) if chat else texts
    facts = facts_of(target, draft, [], decoding, texts, source, [batch_size], problems)
    store: ResultStore = ResultStore(processes)
    if out is not None:
        arms = make_arms(target, draft, field.policies, tokenizer=tokenizer, assisted=False)
        more = {"arms": arm_facts(arms), "max_loss": max_loss, "confidence": confidence, "first": search.first}
        store = ResultFolder(out, facts | more, running.resume, processes)
    batches = len(texts) // batch_size // processes.count + 2  # with a warm-up for either half
    calls = batches * (len(field.policies) + 1)
    with resumable(store), progress("tuning", calls, most=True, quiet=not processes.first) as tell:
        writer = Writer(target, tokenizer, decoding, scoring)
        found = run(writer, draft, field, scoring, problems, texts, search, store=store, tell=tell)
    if not processes.first:
        return
    settings = asdict(decoding) | read_shaping(target.generation_config, sampling.do_sample)
    _report(found, field, search, facts, settings, store if isinstance(store, ResultFolder) else None, as_json)
    if out is not None and (out / "policy").is_dir():
        remember(out / "policy", replace(names, dtype=loading.dtype, chat=chat))
    warn_of_other_decoding(parts, sampling.do_sample)


def _report(
    found: Any, field: Any, search: Any, facts: dict[str, Any], decoding: dict[str, Any], store: Any, as_json: bool
) -> None:
    """Write what was found, and print it."""
    from ..evaluation.tuning import make_certificate

    certificate = make_certificate(found, field, search, facts, decoding)
    line = _advice(found, search, certificate, bool(decoding["do_sample"]))
    if store is not None:
        if certificate is not None:
            replace(field.policies[found.best.step.name], certificate=certificate).save_pretrained(
                store.part / "policy"
            )
        store.finish(found.certified, found.tried, advice=line)
    if as_json:
        rows = [_row(verdict) for verdict in found.verdicts]
        show_json({"advice": line, "certified": [figures.to_dict() for figures in found.certified], "verdicts": rows})
        return
    _show(found)
    show(line)
    if store is not None:
        policy = "policy (LossyPolicy.from_pretrained reads it), " if certificate is not None else ""
        show(f"{store.out}: {policy}run.json, answers.jsonl, summary.csv")


def _first(first: int | None, problems: int, batch_size: int) -> int:
    """How many problems settings are tried on, whole batches."""
    wanted = max(problems // 5, 1) if first is None else first
    check_int("--first", wanted, 1, max(problems - 1, 1))
    whole = max(wanted // batch_size, 1) * batch_size
    if whole + batch_size > problems:
        raise ValueError(
            f"{problems} problems are too few for batches of {batch_size}, some to try settings and some to certify them"
        )
    return whole


def _advice(found: Any, search: Any, certificate: Any, do_sample: bool) -> str:
    lossless = f"{found.lossless.arm} (lossless) is {found.lossless.of_target.value:.2f} × the target"
    if certificate is not None:
        return f"use {certificate}; {lossless}"
    use = f"use {found.lossless.arm}" if found.lossless.of_target.value > 1 else "do not draft here"
    if not found.verdicts:
        sampled = (
            "; sampled texts differ by themselves, and that counts as harm: greedy ones may do" if do_sample else ""
        )
        return f"{use}: {lossless}, and no lossy setting was faster without harm on the first {search.first} problems{sampled}"
    return f"{use}: {lossless}, and no setting that is clearly faster is certified at {search.max_loss:.2%}"


def _row(verdict: Any) -> dict[str, Any]:
    return {
        "policy": verdict.step.name, "tokens_per_second": verdict.tried.speed, "harms": verdict.tried.harms,
        "gains": verdict.tried.gains, "problems": verdict.tried.problems, "harm_bound": verdict.harm, "net_bound": verdict.net,
        "certified": verdict.certified,
    }  # fmt: skip


def _show(found: Any) -> None:
    if not found.verdicts:
        return
    shown = table("candidate", "tokens/s", "harms", "gains", "harm at\nmost", "net at\nmost", "")
    for verdict in found.verdicts:
        tried = verdict.tried
        shown.add_row(
            verdict.step.name, f"{tried.speed:.{digits(tried.speed)}f}", f"{tried.harms}/{tried.problems}", str(tried.gains),
            f"{verdict.harm:.2%}", f"{verdict.net:.2%}", "certified" if verdict.certified else "–",
        )  # fmt: skip
    console(highlight=False).print(shown)
