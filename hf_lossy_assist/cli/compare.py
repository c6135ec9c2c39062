"""`hf-lossy compare`: which policy is fastest for a pair of models on these prompts, and what it costs."""

from pathlib import Path
from typing import Annotated, Any

import typer

import hf_lossy_assist as hla

from ..terminal import show, show_json
from ..validation import LONGEST_DRAFT, check_int, check_number
from .drafters import Drafter, check_compiled, check_draft, load_made
from .exits import end_after
from .figures import show_figures
from .made_with import models_from, parts_in, remark_on, sources_in
from .measured import (
    check_decoding,
    check_out,
    facts_of,
    longest_of,
    progress,
    prompts_of,
    resumable,
    say_what_makes_an_interval,
)
from .options import (
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
    batch_sizes,
    chats,
    needs,
)
from .references import opened_judge, references_in, show_quality


DEFAULT = "strict,svip,svip+fallback"


def compare(
    model: Model = None,
    assistant: Assistant = None,
    drafter: Drafter = None,
    policies: Annotated[
        str,
        typer.Option(help="policies with commas between them: svip,top_k:k=4+svip,strict+fallback, JSON or folders"),
    ] = DEFAULT,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `prompt` (or rows of GSM8K or Spec-Bench)")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="demo, gsm8k, math, a JSON-lines file, or for speed alone mt_bench, spec_bench, sharegpt, lm1b, wikitext"
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="the problems of --task (default: a package's, or the Hub's)")
    ] = None,
    shots: Shots = 0,
    batch_size: Annotated[str, typer.Option(help="prompts at a time; several with commas: 1,8")] = "1",
    limit: Annotated[int | None, typer.Option(help="most prompts (default: all; 12 of the demo)")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="most new tokens of each text")] = 128,
    gamma: Annotated[int, typer.Option(help="draft length of Transformers' assisted generation and of strict")] = 5,
    compile_rounds: Annotated[
        bool, typer.Option("--compile", help="measure the compiled form of each policy too")
    ] = False,
    static: Annotated[
        bool, typer.Option("--static/--no-static", help="measure the target compiled with a static cache")
    ] = True,
    reference: Annotated[
        str | None,
        typer.Option(
            help="compare texts with `task` (its reference texts: ROUGE) or an arm's (ROUGE, a judge); commas between"
        ),
    ] = None,
    judge_url: Annotated[
        str | None, typer.Option(help="OpenAI-compatible server with a judge model, for --reference ARM")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="name of the judge on that server")] = None,
    timeout: Annotated[float, typer.Option(help="seconds of silence of the judge before it is asked again")] = 120.0,
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
    """Measure policies beside the target alone and Transformers' assisted generation, and say what to use.

    Examples:

      hf-lossy compare

      hf-lossy compare --drafter demo --policies svip,strict

      hf-lossy compare --model M --assistant D --prompts questions.jsonl --chat --limit 16 --batch-size 1,8

      hf-lossy compare --model M --assistant D --task gsm8k --data test.jsonl --policies svip,top_k:k=4+svip --out found

      hf-lossy compare --policies strict,autojudge

      hf-lossy compare --policies strict,sprinter:head=head,threshold=0.7,sprinter:head=head,threshold=0.9 --no-static

      hf-lossy compare --model M --assistant D --task lm1b --policies strict,sprinter:head=head --reference task
    """
    end_after(max_hours)
    needs("train", "scipy")
    check_draft(model, assistant, drafter)
    sizes = batch_sizes(batch_size)
    check_int("--gamma", gamma, 1, LONGEST_DRAFT)
    check_number("--timeout", timeout, 0.001, 86400.0)
    references = references_in(reference, judge_url, judge_model)
    from ..evaluation.measuring import DecodingSettings as Decoding
    from ..evaluation.measuring import Writer

    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    check_decoding(decoding)
    check_out(out, resume)
    from ..evaluation.arms import make_arms, why_not_static
    from ..evaluation.comparing import Batches
    from ..evaluation.comparing import compare as run
    from ..evaluation.quality import check_references, compute_quality
    from ..evaluation.results import ResultFolder as Folder
    from ..evaluation.results import ResultStore as Memory
    from ..models.identity import dtype_of
    from ..training.processes import Processes

    processes = Processes.started()
    chosen = _policies(policies, gamma, demo_models=model is None and assistant is None and drafter is None)
    parts = [part for policy in chosen.values() for part in parts_in(policy)]
    made = models_from(model, assistant, sources_in(parts), drafter)
    check_compiled(compile_rounds, made)
    texts, problems, its_task, source = prompts_of(prompts, task, data, made.model, limit, seed, shots)
    batches = Batches(len(texts), sizes)
    if not as_json:
        say_what_makes_an_interval(len(texts), sizes)
    target, draft, tokenizer = load_made(made, dtype, device, overrides)
    asked, texts = texts, chats(tokenizer, texts) if chat else texts
    left_out = {"target compiled": why} if (why := why_not_static(target)) and static else {}
    capacity = longest_of(tokenizer, texts) + max_new_tokens if static and not left_out else None
    arms = make_arms(
        target, draft, chosen, tokenizer=tokenizer, gamma=gamma, capacity=capacity, compiled=compile_rounds
    )
    check_references(references, [arm.name for arm in arms], problems)
    store = None
    if out is not None:
        facts = facts_of(target, draft, arms, decoding, texts, source, sizes, problems)
        store = Folder(out, facts, resume, processes)
    left = processes.share([its for its in batches.all() if store is None or not store.has(its[0], its[1])])
    calls = len(arms) * (len(left) + len({size for size, _, _ in left}))
    with opened_judge(judge_url, judge_model, timeout) as judge:
        with resumable(store), progress("comparing", calls, quiet=not processes.first) as tell:
            found = run(
                Writer(target, tokenizer, decoding, its_task), arms, texts, batches,
                store=store or Memory(processes), task=its_task, problems=problems, tell=tell,
            )  # fmt: skip
        if not processes.first:
            return
        judged = compute_quality(found.answers, asked, references, problems=problems, judge=judge)
    remark_on(parts, do_sample)
    skipped, rounds = left_out | found.left_out, dtype_of(target) != "float32"
    _finish(found, skipped, judged if references else None, sizes, store, rounds, as_json)


def _finish(
    found: Any,
    left_out: dict[str, str],
    judged: list[Any] | None,
    sizes: list[int],
    store: Any,
    rounds: bool,
    as_json: bool,
) -> None:
    """Write the figures into the folder of `store`, if there is one, and show them.

    judged: rows of `--reference`, where it was given. rounds: whether the models compute with fewer digits than float32.
    """
    from ..evaluation.recommend import recommend as advice

    lines = {str(size): advice(found.figures, size) for size in sorted(set(sizes))}
    quality = {} if judged is None else {"quality": [row.to_dict() for row in judged]}
    if store is not None:
        seconds = found.warm_up_seconds
        store.finish(found.figures, advice=lines, left_out=left_out, warm_up_seconds=seconds, **quality)
    if as_json:
        figures = [row.to_dict() for row in found.figures]
        show_json({"figures": figures, "advice": lines, "left_out": left_out, **quality})
        return
    show_figures(found.figures, lines, left_out, rounds=rounds)
    if judged is not None:
        show_quality(judged)
    if store is not None:
        show(f"\n{store.out}: run.json, answers.jsonl (Spec-Bench's format), summary.csv")


def _policies(given: str, gamma: int, demo_models: bool) -> dict[str, Any]:
    """The policies in `--policies`, each under the name that it was given.

    Strict acceptance drafts as many tokens as Transformers' arm does. On the demo's models a method's bare name takes the demo's head.
    """
    from ..policy.parse import make_named_policy as of_name
    from ..policy.short_form import split_policies
    from ..registry import Names
    from ..registry import find_method as method

    constant = hla.Constant(gamma)
    found: dict[str, Any] = {}
    for name in split_policies(given):
        if demo_models and name in Names("method") and method(name).needs == ("head",):
            policy = of_name(name, {"head": hla.demo.head(name)})
        else:
            policy = hla.as_policy(name)
        found[name] = policy if policy.stop is not None else hla.LossyPolicy(policy.rule, constant, policy.filter)
    return found
