"""`hf-lossy compare`: the fastest policy for a pair of models on given prompts, and its cost."""

from dataclasses import asdict
from typing import Annotated

import hf_lossy_assist as hla

from .. import evaluation, policy
from ..terminal import show, show_json
from ..validation import LONGEST_DRAFT, MOST, require
from . import _models, _options, _runs
from ._printing import show_metrics


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
    running: _options.RunOptions,
    ray: _options.Ray = None,
    sampling: _options.SamplingOptions,
    loading: _options.LoadOptions,
    chat: _options.Chat = False,
    as_json: _options.AsJson = False,
) -> None:
    """Compare policies with the target alone and Transformers' assisted generation, and recommend one. Several drafts are compared in one run.

    Examples:

      hf-lossy compare

      hf-lossy compare --drafter demo --policies svip,strict

      hf-lossy compare --assistant demo --assistant exit:2 --assistant suffix --policies strict,svip

      hf-lossy compare --model M --assistant D --prompts questions.jsonl --chat --limit 16 --batch-size 1,8

      hf-lossy compare --model M --assistant D --task gsm8k --data test.jsonl --policies svip,top_k:k=4+svip --out found

      hf-lossy compare --policies strict,autojudge

      hf-lossy compare --policies strict,sprinter:head=head,threshold=0.7,sprinter:head=head,threshold=0.9 --no-static
    """
    require("this command", "scipy")
    sizes = _options.read_batch_sizes(batch_size)
    sampling.check()
    _runs.check_out(out, running.resume)
    from ..models.introspection import dtype_of

    decoding = evaluation.writer.DecodingSettings(max_new_tokens=max_new_tokens, **asdict(sampling))
    chosen = _read_policies(policies, gamma, models.demo)
    if compile_rounds and models.drafter is not None:
        raise ValueError("--compile: rounds on the target's hidden states are not compiled: leave it or --drafter out")
    questions, problems, scoring, source = _runs.read_problems(
        prompts, task, data, models.model, limit, sampling.seed, shots
    )
    batches = evaluation.comparison.list_batches(len(questions), sizes)
    if not as_json:
        _runs.announce_missing_intervals(len(questions), sizes)
    processes = _runs.find_workers(ray, models, loading, _models.load_drafts, timed=True)
    target, drafts, tokenizer = _models.load_drafts(models, loading)
    texts = _models.with_template(tokenizer, questions) if chat else questions
    left_out = {"target compiled": why} if (why := evaluation.arms.why_not_static(target)) and static else {}
    longest = max(len(ids) for ids in tokenizer(texts)["input_ids"])
    capacity = longest + max_new_tokens if static and not left_out else None

    def make(
        loaded: "evaluation.arms.Loaded",
    ) -> "tuple[evaluation.writer.TextWriter, list[evaluation.arms.Arm]]":
        target, drafts, tokenizer = loaded
        arms = evaluation.arms.make_arms(
            target, drafts, chosen, tokenizer=tokenizer, gamma=gamma, capacity=capacity, compiled=compile_rounds
        )
        return evaluation.writer.TextWriter(target, tokenizer, decoding, scoring), arms

    writer, arms = make((target, drafts, tokenizer))
    store: evaluation.results.ResultStore = evaluation.results.ResultStore(processes)
    if out is not None:
        results = evaluation.results
        facts = results.describe_comparison(writer, drafts, arms, texts, source, sizes, problems, processes)
        store = results.ResultFolder(out, facts, running.resume, processes)
    with _runs.resumable(store):
        found = evaluation.comparison.compare_arms(
            writer,
            arms,
            texts,
            batches,
            store=store,
            problems=problems,
            loaded=((target, drafts, tokenizer), make),
        )
    if not processes.first:
        return
    _finish(found, left_out | found.left_out, sizes, store, dtype_of(target), as_json)


def _finish(
    found: "evaluation.comparison.ComparisonResult",
    left_out: dict[str, str],
    sizes: list[int],
    store: "evaluation.results.ResultStore",
    dtype: str,
    as_json: bool,
) -> None:
    """Write the metrics into the folder of the run, if it has one, and print them.

    dtype: the precision of the target.
    """
    advice = {str(size): evaluation.recommend.recommend(found.metrics, size) for size in sorted(set(sizes))}
    if isinstance(store, evaluation.results.ResultFolder):
        seconds = found.warm_up_seconds
        store.finish(found.metrics, advice=advice, left_out=left_out, warm_up_seconds=seconds)
    if as_json:
        figures = [row.to_dict() for row in found.metrics]
        show_json({"figures": figures, "advice": advice, "left_out": left_out})
        return
    show_metrics(found.metrics, advice, left_out, dtype)
    if isinstance(store, evaluation.results.ResultFolder):
        show(f"\n{store.out}: run.json, answers.jsonl (Spec-Bench's format), summary.csv")


def _read_policies(given: str, gamma: int, demo_models: bool) -> "dict[str, hla.LossyPolicy]":
    """Read `--policies`, each under the name as given.

    Strict acceptance drafts as many tokens as Transformers' arm. With the demo's models a method's bare name uses the demo's head.
    """
    constant = hla.Constant(gamma)
    chosen: dict[str, hla.LossyPolicy] = {}
    for name in policy.parse.split_policies(given):
        found = _models.read_policy(name, demo_models)
        chosen[name] = found if found.stop is not None else hla.LossyPolicy(found.rule, constant, found.filter)
    return chosen
