"""`hf-lossy tune`: the fastest setting whose loss is certified."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..terminal import console, digits, show, show_json, table
from ..validation import MOST_ROWS, check_int, check_number
from .drafters import Drafter, check_draft, load_made
from .exits import end_after
from .made_with import models_from, parts_in, remark_on, remember, sources_in
from .measured import check_answers, check_decoding, check_out, facts_of, once_each, progress, prompts_of, resumable
from .options import (
    DEMO,
    AsJson,
    Assistant,
    Chat,
    Device,
    DoSample,
    DType,
    MaxHours,
    Model,
    Overrides,
    Resume,
    Seed,
    Shots,
    Temperature,
    TopK,
    TopP,
    chats,
    needs,
)


DEFAULT = "svip,strict,top_k+svip,lenience+svip,typical+svip"
DEMO_LIMIT = 400


def tune(
    model: Model = None,
    assistant: Assistant = None,
    drafter: Drafter = None,
    task: Annotated[
        str, typer.Option(help="a task whose right answers are known: gsm8k, math or a JSON-lines file")
    ] = DEMO,
    data: Annotated[
        Path | None, typer.Option(help="the problems of --task (default: a package's, or the Hub's)")
    ] = None,
    max_loss: Annotated[float, typer.Option(help="the largest rate of harm: 0.01 is one answer in a hundred")] = 0.01,
    confidence: Annotated[float, typer.Option(help="that the certificate is right")] = 0.95,
    policies: Annotated[
        str,
        typer.Option(
            help="what to try, lossless ones among it; a rule without its parameter is tried from strict to lax"
        ),
    ] = DEFAULT,
    limit: Annotated[int | None, typer.Option(help="most problems (default: all; 400 of the demo)")] = None,
    first: Annotated[
        int | None, typer.Option(help="problems that settings are tried on; the others certify (default: a fifth)")
    ] = None,
    shots: Shots = 0,
    batch_size: Annotated[int, typer.Option(help="prompts at a time")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="most new tokens of each text")] = 256,
    out: Annotated[
        Path | None, typer.Option(help="folder to write; must not exist (default: nothing is written)")
    ] = None,
    resume: Resume = False,
    max_hours: MaxHours = None,
    do_sample: DoSample = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    dtype: DType = "float32",
    device: Device = "auto",
    overrides: Overrides = None,
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
    end_after(max_hours)
    needs("train", "scipy")
    check_draft(model, assistant, drafter)
    check_number("--max-loss", max_loss, 1e-6, 1.0)
    check_number("--confidence", confidence, 0.5, 1 - 1e-9)
    check_int("--batch-size", batch_size, 1, MOST_ROWS)
    from ..evaluation.measuring import DecodingSettings as Decoding
    from ..evaluation.measuring import Writer

    decoding = Decoding(
        max_new_tokens=max_new_tokens, do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )  # fmt: skip
    check_decoding(decoding)
    check_out(out, resume)
    from ..artifacts.conditions import read_shaping as shaping_at
    from ..evaluation.arms import make_arms
    from ..evaluation.results import ResultFolder as Folder
    from ..evaluation.results import ResultStore as Memory
    from ..evaluation.tuning import Search
    from ..evaluation.tuning import describe_power as promise
    from ..evaluation.tuning import parse_search_space as field_of
    from ..evaluation.tuning import tune as run
    from ..policy.short_form import split_policies
    from ..training.processes import Processes

    processes = Processes.started()
    field = field_of(split_policies(policies))
    limit = DEMO_LIMIT if limit is None and task == DEMO else limit
    parts = [part for policy in field.policies.values() for part in parts_in(policy)]
    made = models_from(model, assistant, sources_in(parts), drafter)
    problems, its_task, source = _problems(task, data, made.model, limit, seed, shots)
    texts = [problem.prompt for problem in problems]
    search = Search(max_loss, 1 - confidence, _first(first, len(texts), batch_size), batch_size)
    ladders = len({step.ladder for step in field.steps})
    if not as_json:
        show(promise(len(texts) // batch_size * batch_size - search.first, search, ladders))
    target, draft, tokenizer = load_made(made, dtype, device, overrides)
    texts = chats(tokenizer, texts) if chat else texts
    store = None
    if out is not None:
        arms = make_arms(target, draft, field.policies, tokenizer=tokenizer, assisted=False)
        facts = facts_of(target, draft, arms, decoding, texts, source, [batch_size], problems)
        facts |= {"max_loss": max_loss, "confidence": confidence, "first": search.first}
        store = Folder(out, facts, resume, processes)
    batches = len(texts) // batch_size // processes.count + 2  # with a warm-up for either half
    calls = batches * (len(field.policies) + 1)
    with resumable(store), progress("tuning", calls, most=True, quiet=not processes.first) as tell:
        found = run(
            Writer(target, tokenizer, decoding, its_task),
            draft,
            field,
            its_task,
            problems,
            texts,
            search,
            store=store or Memory(processes),
            tell=tell,
        )
    if not processes.first:
        return
    _tell(
        found,
        field,
        search,
        facts_of(target, draft, [], decoding, texts, source, [batch_size], problems),
        asdict(decoding) | shaping_at(target.generation_config, do_sample),
        store,
        as_json,
    )
    if store is not None and (store.out / "policy").is_dir():
        remember(store.out / "policy", replace(made, dtype=dtype, chat=chat))
    remark_on(parts, do_sample)


def _tell(
    found: Any, field: Any, search: Any, facts: dict[str, Any], decoding: dict[str, Any], store: Any, as_json: bool
) -> None:
    """Write what was found, and print it."""
    from ..evaluation.tuning import make_certificate as certificate_of

    certificate = certificate_of(found, field, search, facts, decoding)
    line = _advice(found, search, certificate, bool(decoding["do_sample"]))
    if store is not None:
        if certificate is not None:
            replace(field.policies[found.best.step.name], certificate=certificate).save_pretrained(
                store.part / "policy"
            )
        store.finish(found.certified, found.tried, advice=line)
    if as_json:
        rows = [_row(verdict) for verdict in found.verdicts]
        show_json({"advice": line, "certified": [its.to_dict() for its in found.certified], "verdicts": rows})
        return
    _show(found)
    show(line)
    if store is not None:
        policy = "policy (LossyPolicy.from_pretrained reads it), " if certificate is not None else ""
        show(f"{store.out}: {policy}run.json, answers.jsonl, summary.csv")


def _problems(
    task: str, data: Path | None, model: str | None, limit: int | None, seed: int, shots: int
) -> tuple[list[Any], Any, str]:
    """Each problem once, with its right answer; their task, and what they are called in the record."""
    _, problems, its_task, source = prompts_of(None, task, data, model, limit, seed, shots)
    problems = once_each(problems, source)
    check_answers(problems, source)
    return problems, its_task, source


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
    for its in found.verdicts:
        shown.add_row(
            its.step.name, f"{its.tried.speed:.{digits(its.tried.speed)}f}", f"{its.tried.harms}/{its.tried.problems}", str(its.tried.gains),
            f"{its.harm:.2%}", f"{its.net:.2%}", "certified" if its.certified else "–",
        )  # fmt: skip
    console(highlight=False).print(shown)
