"""`hf-lossy generate`: prompts continued with a draft model's help."""

from pathlib import Path
from typing import Annotated, Any

import typer

import hf_lossy_assist as hla

from ..artifacts.files import check_file
from ..tasks.prompts import read_prompts
from ..terminal import show_json
from ..training.processes import Processes
from ..validation import check_int
from .drafters import load_made, read_drafter
from .generated import json_report, show_outputs, show_report, write_page
from .made_with import MadeWith, folder_of, models_from, remark_on, remark_on_companion, sources_in
from .options import (
    TARGET,
    AsJson,
    Assistant,
    Chat,
    Companion,
    Device,
    DoSample,
    DType,
    Model,
    Overrides,
    Seed,
    Temperature,
    TopK,
    TopP,
    chats,
    needs,
)
from .policy_options import PolicyOptions
from .writing import Decoding, write


DEMO_PROBLEMS = 3


def generate(
    model: Model = None,
    assistant: Assistant = None,
    policy: Annotated[
        str, typer.Option(help=f"method, rule or stop by name, JSON, file, folder or Hub id; `{TARGET}` for no draft")
    ] = "strict",
    head: Annotated[
        str | None,
        typer.Option(help="head for sprinter, autojudge or specdec: a folder or Hub id (default: the demo's)"),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="decision threshold of the head (default: the head's own, or the method's)")
    ] = None,
    window: Annotated[int | None, typer.Option(help="draft length for autojudge (default: 32)")] = None,
    profile: Annotated[
        str | None, typer.Option(help="profile for sv: a folder or Hub id (default: the demo's)")
    ] = None,
    companion: Companion = None,
    gamma: Annotated[int | None, typer.Option(help="draft length for sv (default: the profile's)")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="what drafts instead of the assistant: suffix, composite, …, or JSON with its name"),
    ] = None,
    compile_rounds: Annotated[
        bool, typer.Option("--compile", help="compile the rounds; the first texts wait for it")
    ] = False,
    fallback: Annotated[bool, typer.Option("--fallback", help="stop drafting while it does not pay")] = False,
    prompt: Annotated[
        list[str] | None, typer.Option(help="a prompt; repeatable (default: a few demo problems)")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `prompt` (or rows of GSM8K or Spec-Bench)")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="most prompts (default: all; of the demo 3, or one batch)")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="most new tokens of each text")] = 128,
    do_sample: DoSample = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    batch_size: Annotated[int, typer.Option(help="texts that are written at a time")] = 1,
    dtype: DType = "float32",
    device: Device = "auto",
    overrides: Overrides = None,
    chat: Chat = False,
    stream: Annotated[bool, typer.Option("--stream", help="print each text as it is written (batch size 1)")] = False,
    html: Annotated[Path | None, typer.Option(help="write the texts as a page, each token with its source")] = None,
    as_json: AsJson = False,
) -> None:
    """Continue prompts with a draft model's help, and say how much it helped.

    Without --model and --assistant the models are those that the head's or profile's folder was made with, or the demo's.

    Examples:

      hf-lossy generate --policy svip

      hf-lossy generate --model M --assistant D --prompts questions.jsonl --chat --policy svip --fallback --batch-size 8

      hf-lossy generate --policy sprinter --head head --threshold 0.7 --prompt "How many legs have six ants?"
    """
    decoding = Decoding(
        max_new_tokens=max_new_tokens, do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        batch_size=batch_size, stream=stream,
    )  # fmt: skip
    options = PolicyOptions(
        policy=policy, head=head, threshold=threshold, window=window, profile=profile, companion=companion, gamma=gamma,
        fallback=fallback,
    )  # fmt: skip
    if html is not None:
        needs("train", "jinja2", "matplotlib")
        check_file("--html", html)
    if stream and (as_json or batch_size > 1):
        raise ValueError("--stream shows one text at a time: leave out --json and --batch-size")
    drafts = read_drafter(drafter, policy, model, assistant)
    finish, parts = options.read(demo_models=model is None)
    made = (
        models_from(model, assistant, [*sources_in(parts), *folder_of(policy)])
        if drafts is None
        else MadeWith(model, assistant)
    )
    if limit is not None:
        check_int("--limit", limit, 1)
    texts, problems = _texts(prompt, prompts, made.model, seed, limit, max(DEMO_PROBLEMS, batch_size))
    target, draft, tokenizer = load_made(made, dtype, device, overrides)
    chosen = finish(target, draft, tokenizer, made.companion)
    if drafts is not None and not drafts.needs_assistant:
        draft = None
    asked = {"assistant_model": draft, "drafter": drafts, "lossy_policy": chosen}
    if compile_rounds:
        asked["cache_implementation"] = "static"
    written = write(target, tokenizer, asked, chats(tokenizer, texts) if chat else texts, decoding)
    outputs = written.outputs
    if not Processes.started().first:
        return
    if html is not None:
        write_page(html, outputs, tokenizer, policy)
    remark_on(parts, do_sample)
    remark_on_companion(chosen, batch_size)
    if as_json:
        names: dict[str, Any] = {
            "model": made.model or "demo/target",
            "assistant": (made.assistant or "demo/draft")
            if chosen and draft is not None and made.drafter is None
            else None,
        }
        if (named := drafter or made.drafter) is not None:
            names["drafter"] = named
        names["policy"] = policy if chosen is None else chosen.to_dict() or "strict"
        show_json(json_report(written, tokenizer, names))
        return
    show_outputs(outputs, tokenizer, problems, streamed=stream)
    show_report(written, policy)


def _texts(
    prompt: list[str] | None, prompts: Path | None, model: str | None, seed: int, limit: int | None, usual: int
) -> tuple[list[str], list[Any]]:
    """The prompts, and the demo problems that they are, if they are; `usual`: so many of the demo where there is no limit."""
    if prompt and prompts:
        raise ValueError("--prompt and --prompts are two sources: pass one of them")
    texts = list(prompt or [])[:limit] or (read_prompts(prompts, limit) if prompts else [])
    problems = [] if texts or model is not None else hla.demo.problems(usual if limit is None else limit, seed)
    texts = texts or [p.prompt for p in problems]
    if not texts:
        raise ValueError("nothing to continue: pass --prompt or --prompts with --model")
    if not all(t.strip() for t in texts):
        raise ValueError("a prompt is empty: every prompt needs some text")
    return texts, problems
