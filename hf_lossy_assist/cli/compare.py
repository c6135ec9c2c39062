"""`hf-lossy compare`: which policy is fastest for a pair of models on these prompts, and what it costs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_lossy_assist as hla

from ..terminal import show, show_json
from ..validation import LONGEST_DRAFT, check_int
from .drafters import Drafter, check_compiled, check_draft, load_made
from .exits import end_after
from .figures import show_figures
from .made_with import models_from, parts_in, remark_on, sources_in
from .measured import check_decoding, check_out, facts_of, longest_of, progress, prompts_of, resumable
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
    """
    end_after(max_hours)
    needs("train", "scipy")
    check_draft(model, assistant, drafter)
    sizes = batch_sizes(batch_size)
    check_int("--gamma", gamma, 1, LONGEST_DRAFT)
    from ..evaluation.measuring import Decoding, Writer

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
    from ..evaluation.advice import advice
    from ..evaluation.arms import make_arms, why_not_static
    from ..evaluation.comparing import Batches
    from ..evaluation.comparing import compare as run
    from ..evaluation.scoring import score_answers
    from ..evaluation.store import Folder, Memory
    from ..training.processes import Processes

    processes = Processes.started()
    chosen = _policies(policies, gamma)
    parts = [part for policy in chosen.values() for part in parts_in(policy)]
    made = models_from(model, assistant, sources_in(parts), drafter)
    check_compiled(compile_rounds, made)
    texts, problems, its_task, source = prompts_of(prompts, task, data, made.model, limit, seed, shots)
    batches = Batches(len(texts), sizes)
    target, draft, tokenizer = load_made(made, dtype, device, overrides)
    texts = chats(tokenizer, texts) if chat else texts
    left_out = {"target compiled": why} if (why := why_not_static(target)) and static else {}
    capacity = longest_of(tokenizer, texts) + max_new_tokens if static and not left_out else None
    arms = make_arms(
        target, draft, chosen, tokenizer=tokenizer, gamma=gamma, capacity=capacity, compiled=compile_rounds
    )
    store = None
    if out is not None:
        facts = facts_of(target, draft, arms, decoding, texts, source, sizes, problems)
        store = Folder(out, facts, resume, processes)
    left = processes.share([its for its in batches.all() if store is None or not store.has(its[0], its[1])])
    calls = len(arms) * (len(left) + len({size for size, _, _ in left}))
    with resumable(store), progress("comparing", calls, quiet=not processes.first) as tell:
        found = run(
            Writer(target, tokenizer, decoding, its_task),
            arms,
            texts,
            batches,
            store=store or Memory(processes),
            task=its_task,
            problems=problems,
            tell=tell,
        )
    if not processes.first:
        return
    left_out |= found.left_out
    lines = {str(size): advice(found.figures, size) for size in sorted(set(sizes))}
    if store is not None:
        score_answers(Writer(target, tokenizer, decoding), draft, chosen, store.answers, texts)
        store.finish(found.figures, advice=lines, left_out=left_out, warm_up_seconds=found.warm_up_seconds)
    remark_on(parts, do_sample)
    if as_json:
        show_json({"figures": [its.to_dict() for its in found.figures], "advice": lines, "left_out": left_out})
        return
    show_figures(found.figures, lines, left_out)
    if out is not None:
        show(f"\n{out}: run.json, answers.jsonl (Spec-Bench's format), summary.csv")


def _policies(given: str | Mapping[str, Any], gamma: int) -> dict[str, Any]:
    """`--policies`, each under the name that it was given, or those of another command. Strict acceptance drafts as many tokens as
    Transformers' arm does.
    """
    from ..policy.short_form import split_policies

    constant = hla.Constant(gamma)
    found: dict[str, Any] = {}
    policies = {name: hla.as_policy(name) for name in split_policies(given)} if isinstance(given, str) else given
    for name, policy in policies.items():
        found[name] = policy if policy.stop is not None else hla.LossyPolicy(policy.rule, constant, policy.filter)
    return found
